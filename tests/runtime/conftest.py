"""One tiny runtime a session of each kind, and mlx_lm's own answers to compare with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.models.tiny import build_tiny

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model by architecture."""
    folders: dict[str, Path] = {}

    def get(architecture: str) -> Path:
        if architecture not in folders:
            folders[architecture] = build_tiny(architecture, tmp_path_factory.mktemp(architecture))
        return folders[architecture]

    return get


@pytest.fixture(scope="session")
def alone(folder_of: Callable[[str], Path]) -> Callable[[str, list[int], int], list[int]]:
    """Greedy tokens of mlx_lm alone."""
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    models: dict[str, Any] = {}

    def get(architecture: str, prompt: list[int], count: int) -> list[int]:
        if architecture not in models:
            models[architecture] = load(str(folder_of(architecture)))[0]
        steps = generate_step(mx.array(prompt), models[architecture], max_tokens=count)
        return [int(token) for token, _ in steps]

    return get
