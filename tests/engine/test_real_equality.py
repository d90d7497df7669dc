"""Greedy tokens of the two real models equal mlx_lm's alone: 16 requests that join and leave, overlap on and off.

Runs by name: `pytest -m real tests/engine/test_real_equality.py` (wheels from the package index, some minutes).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import generate_step

from mlx_troupe.runtime.clock import MonotonicClock
from mlx_troupe.runtime.config import RuntimeConfig
from mlx_troupe.runtime.engine.build import build_engine
from mlx_troupe.runtime.models.gguf_convert import Form, convert_gguf
from tests.models.test_real import demo, gemma_gguf  # noqa: F401 - fixtures

from .driver import Driver, Job

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.real, pytest.mark.heavy]

TEXT = (
    "A theatre troupe once lived in a small town by the sea. Every evening the actors met in the market place and "
    "argued about the play: who should speak first, who should wait, and how long a silence may last. "
)


def check(model: Any, encode: Any, lengths: list[int]) -> None:
    """Both ways of overlapping, the same prompts."""
    rng = random.Random(5)
    words = encode(TEXT * 12)
    prompts = [words[(start := rng.randrange(200)) : start + length] for length in lengths]
    counts = [rng.randrange(1, 24) for _ in prompts]
    alone = [
        [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    for overlap in ("launch", "off"):
        config = RuntimeConfig(overlap=overlap, length_classes=(64, 256, 1024))
        engine = build_engine(model, config, MonotonicClock(), vocab_size=1, context_length=8192)
        jobs = [Job(row, prompt, counts[row]) for row, prompt in enumerate(prompts)]
        outputs = Driver(engine, jobs, chunk_sizes=(32, 64, 256), seed=1).run()
        assert [outputs[row] for row in range(len(prompts))] == alone, overlap
        engine.close()


def test_smollm2(demo: Path) -> None:  # noqa: F811 - the fixture
    model, tokenizer = load(str(demo))[:2]
    check(model, tokenizer.encode, [1, 3, 9, 17, 24, 31, 40, 52, 64, 65, 80, 96, 110, 130, 200, 260])


def test_gemma3_with_its_windows(gemma_gguf: Path, tmp_path: Path) -> None:  # noqa: F811 - the fixture
    folder = convert_gguf(gemma_gguf, form=Form("float32"), cache_folder=tmp_path)
    model, tokenizer = load(str(folder))[:2]
    check(model, tokenizer.encode, [1, 5, 12, 20, 33, 40, 55, 64, 70, 90, 100, 128, 150, 300, 505, 540])
