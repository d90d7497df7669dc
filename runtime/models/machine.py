"""What kind of machine this is, told without importing MLX."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from pathlib import Path

CUDA_DISTRIBUTIONS = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")


@functools.cache
def is_linux_cpu() -> bool:
    """True where MLX runs on a Linux processor: there only float32 products are fast."""
    return sys.platform == "linux" and not (_has_cuda_backend() and Path("/dev/nvidiactl").exists())


def _has_cuda_backend() -> bool:
    return any(_is_installed(name) for name in CUDA_DISTRIBUTIONS)


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
