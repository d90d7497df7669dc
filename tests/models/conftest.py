"""A fast BLAS before the first import of MLX, and a cache of its own for every test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mlx_troupe.runtime.models.blas import load_blas

if TYPE_CHECKING:
    from pathlib import Path

load_blas()


@pytest.fixture(autouse=True)
def private_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees or touches the user's caches."""
    monkeypatch.setenv("MLX_TROUPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
