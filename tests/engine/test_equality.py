"""Greedy output equals mlx_lm's alone, token for token, for every cache kind, in a busy batch, overlap on and off."""

from __future__ import annotations

import pytest

from mlx_troupe.runtime.clock import MonotonicClock
from mlx_troupe.runtime.config import RuntimeConfig
from mlx_troupe.runtime.engine.build import build_engine

from .conftest import VOCAB, random_prompts
from .driver import Driver, Job

TABLE = [
    "llama",
    "qwen3",
    "deepseek_v2",
    "deepseek_v3",
    "gemma3_text",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5",
    "lfm2",
    "mamba2",
    "falcon_h1",
    "mamba",
    "llama4",
    "gemma3n",
]


@pytest.mark.parametrize("overlap", ["launch", "build", "off"])
@pytest.mark.parametrize("architecture", TABLE)
def test_busy_batch_equals_mlx_lm(architecture, overlap, tiny_model, solo) -> None:
    """16 requests of different lengths join and leave at random steps; small length classes force moves."""
    config = RuntimeConfig(overlap=overlap, length_classes=(16, 64, 256))
    engine = build_engine(tiny_model(architecture), config, MonotonicClock(), vocab_size=VOCAB, context_length=4096)
    counts = [24, 3, 17, 1, 30, 24, 9, 40, 5, 24, 12, 33, 2, 24, 8, 20]
    jobs = [Job(row, prompt, counts[row]) for row, prompt in enumerate(random_prompts(16, seed=7))]
    outputs = Driver(engine, jobs, seed=3).run()
    for job in jobs:
        assert job.failed is None
        assert outputs[job.row] == solo(architecture, job.prompt, 40)[: job.max_tokens], f"row {job.row}"
