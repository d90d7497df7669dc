"""Tiny models, made once a session, and engines over them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.models.tiny import build_tiny

if TYPE_CHECKING:
    from collections.abc import Callable

VOCAB = 512


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """A loaded tiny model by architecture; loaded once a session."""
    from mlx_lm import load

    loaded: dict[str, Any] = {}

    def get(architecture: str) -> Any:
        if architecture not in loaded:
            folder = build_tiny(architecture, tmp_path_factory.mktemp(architecture), vocab=VOCAB)
            loaded[architecture] = load(str(folder))[0]
        return loaded[architecture]

    return get


@pytest.fixture(scope="session")
def solo(tiny_model: Callable[[str], Any]) -> Callable[[str, list[int], int], list[int]]:
    """Greedy tokens of mlx_lm alone, cached."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    known: dict[tuple[str, tuple[int, ...], int], list[int]] = {}

    def get(architecture: str, prompt: list[int], count: int) -> list[int]:
        key = (architecture, tuple(prompt), count)
        if key not in known:
            step = generate_step(mx.array(prompt), tiny_model(architecture), max_tokens=count)
            known[key] = [int(token) for token, _ in step]
        return known[key]

    return get


def random_prompts(count: int, *, seed: int = 0, lengths: tuple[int, ...] = (1, 2, 5, 17, 23, 33, 40, 70, 130)) -> list[list[int]]:
    """Prompts of mixed lengths over the tiny vocabulary."""
    rng = random.Random(seed)
    return [[rng.randrange(10, VOCAB - 10) for _ in range(rng.choice(lengths))] for _ in range(count)]
