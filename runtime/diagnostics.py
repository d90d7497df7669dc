"""What `mlx-troupe doctor` prints: versions, device, memory, BLAS and advice. Loads MLX, so it is imported late."""

from __future__ import annotations

import platform
import shutil
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from .models.blas import BlasReport

PACKAGES = (
    "mlx-troupe",
    "mlx",
    "mlx-cpu",
    "mlx-cuda-13",
    "mlx-metal",
    "mlx-lm",
    "transformers",
    "tokenizers",
    "aiohttp",
    "anyio",
    "msgspec",
)


def report() -> dict[str, dict[str, Any]]:
    """Facts by section; the section "advice" holds one line for each thing worth changing."""
    from .models.blas import load_blas

    blas = load_blas()
    from .engine.device import device_facts, donation_copies

    facts = device_facts()
    memory = psutil.virtual_memory()
    return {
        "versions": {"python": platform.python_version(), **_versions()},
        "device": {**facts, "launching_ahead_copies": donation_copies()},
        "memory": {"total_bytes": memory.total, "available_bytes": memory.available},
        "blas": {"library": blas.library, "core": blas.core, "generic": blas.generic},
        "advice": {str(number): line for number, line in enumerate(_advice(blas, facts), start=1)},
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _advice(blas: BlasReport, facts: dict[str, Any]) -> list[str]:
    lines = []
    if sys.platform == "linux" and facts["backend"] == "cpu":
        if blas.advice:
            lines.append(blas.advice)
        if shutil.which("g++") is None:
            lines.append("g++ was not found: MLX then runs uncompiled; install it (Debian: apt-get install g++)")
        if {"mlx-cpu", "mlx-cuda-13"} <= _versions().keys():
            lines.append(
                "mlx-cpu and mlx-cuda-13 are both installed and the CPU one won: "
                "pip install --force-reinstall --no-deps mlx-cuda-13"
            )
    return lines
