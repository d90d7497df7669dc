"""One BLAS for everything that is compared: MLX's wheel for Linux bundles the slow reference BLAS.

Debian's OpenBLAS may choose a generic core on a new processor, so the core type is named.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

OPENBLAS = "libopenblas.so.0"
CPU_INFO = Path("/proc/cpuinfo")


def core_type(flags: str) -> str | None:
    """OpenBLAS's name of the best core for the CPU's `flags`, None for its own choice."""
    words = set(flags.split())
    if {"avx512f", "avx512bw", "avx512vl"} <= words:
        return "SkylakeX"
    return "Haswell" if {"avx2", "fma"} <= words else None


def environment(library: str | None = OPENBLAS) -> dict[str, str]:
    """Variables that give a child process the BLAS; empty off Linux or without a library."""
    if library is None or sys.platform != "linux":
        return {}
    core = core_type(CPU_INFO.read_text())
    return {"LD_PRELOAD": library} | ({"OPENBLAS_CORETYPE": core} if core else {})


def preload(library: str = OPENBLAS) -> None:
    """Load the BLAS into this process, before MLX is imported. Raises OSError if it is missing."""
    variables = environment(library)
    os.environ.update({name: value for name, value in variables.items() if name != "LD_PRELOAD"})
    if variables:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def found(library: str = OPENBLAS) -> str | None:
    """The library's name if it can be loaded here, else None."""
    if sys.platform != "linux":
        return None
    try:
        ctypes.CDLL(library)
    except OSError:
        return None
    return library
