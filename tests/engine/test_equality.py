"""Greedy output equals mlx_lm's alone, token for token, for every cache kind, in a busy batch, overlap on and off."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mlx_troupe.runtime.clock import MonotonicClock
from mlx_troupe.runtime.config import RuntimeConfig
from mlx_troupe.runtime.engine.build import build_engine

from .conftest import CLASSES, TABLE, VOCAB, random_prompts
from .driver import Driver, Job

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_troupe.runtime.engine_protocol import Engine

COUNTS = [24, 3, 17, 1, 30, 24, 9, 40, 5, 24, 12, 33, 2, 24, 8, 20]
OTHERS = ["qwen2", "gemma2", "cohere2", "phi3", "jamba", "rwkv7"]


def check(engine: Engine, expect: Callable[[list[int], int], list[int]], counts: list[int]) -> None:
    """Requests of different lengths join and leave at random steps."""
    jobs = [Job(row, prompt, counts[row]) for row, prompt in enumerate(random_prompts(len(counts)))]
    outputs = Driver(engine, jobs, seed=3).run()
    for job in jobs:
        assert job.failed is None
        assert outputs[job.row] == expect(job.prompt, job.max_tokens), f"row {job.row}"


@pytest.mark.parametrize("overlap", ["launch", "build", "off"])
@pytest.mark.parametrize("architecture", TABLE)
def test_busy_batch_equals_mlx_lm(architecture, overlap, new_engine, solo) -> None:
    """16 requests; small length classes force moves. Only when launching ahead are the rows long, to save time."""
    counts = COUNTS if overlap == "launch" else [1 + count // 2 for count in COUNTS]
    check(new_engine(architecture, overlap), lambda prompt, count: solo(architecture, prompt, count), counts)


@pytest.mark.parametrize("architecture", OTHERS)
def test_other_architectures_equal_mlx_lm(architecture, new_engine, solo) -> None:
    check(new_engine(architecture), lambda prompt, count: solo(architecture, prompt, count), COUNTS[:6])


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next", "llama4"])
def test_an_engine_as_it_is_built(architecture, tiny_model, solo) -> None:
    """All measurements made, everything chosen by them."""
    config = RuntimeConfig(length_classes=CLASSES)
    engine = build_engine(tiny_model(architecture), config, MonotonicClock(), vocab_size=7, context_length=4096)
    facts = engine.facts
    assert facts.vocab_size == VOCAB
    assert facts.overlap in ("launch", "build")
    assert (facts.page_bytes > 0) == (architecture == "llama")
    assert (facts.layout == "batched") == (architecture != "llama4")
    assert facts.prefill_token_s > 0
    check(engine, lambda prompt, count: solo(architecture, prompt, count), COUNTS[:6])
