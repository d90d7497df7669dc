"""Give MLX a fast BLAS on a Linux CPU, before MLX is imported.

MLX's CPU wheel bundles the reference BLAS (2 GFLOP/s). Its calls are resolved by name when `mlx.core`
is loaded, so a library loaded first and globally takes its place: float32 products become 50 times
faster. Debian's OpenBLAS may not know a new processor and fall back to a generic kernel, so the kernel
is chosen here from the processor's flags.

OpenBLAS's threads wait for each other by spinning, so on a small model a second one costs the event loop its core and
gains nothing (32 rows of a tiny model, two cores, streamed over HTTP: 1.2 times as fast with one). How many there are
can be changed while running; the engine measures and decides.

Invariants: nothing here imports MLX; a second call returns the first report; the user's own
`OPENBLAS_CORETYPE` is never overridden.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import glob
import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

DISABLE_VARIABLE = "MLX_TROUPE_NO_BLAS"
CORE_VARIABLE = "OPENBLAS_CORETYPE"
THREADS_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
GENERIC_CORES = frozenset({"prescott", "core2", "generic", "unknown", "banias", "katmai", "atom"})
"""Kernels without AVX, in lower case. ARM's "armv8" is a good one."""
CORE_BY_FLAG = (("avx512vl", "SkylakeX"), ("avx2", "Haswell"), ("avx", "Sandybridge"), ("sse4_2", "Nehalem"))
"""Processor flag and the OpenBLAS kernel that needs it, best first."""
OPENBLAS_NAMES = ("libopenblas.so.0", "libopenblas.so")
ADVICE = (
    "Float32 products run about 50 times slower than they could. Install OpenBLAS "
    "(Debian and Ubuntu: apt-get install libopenblas0-pthread; Fedora: dnf install openblas-threads) "
    "or MKL (pip install mkl), then start again."
)


class BlasReport(msgspec.Struct, frozen=True, kw_only=True):
    """Which BLAS MLX will call.

    Attributes:
        status: "loaded"; "bundled" (none found, MLX's own is used); "late" (MLX was imported first, so
            nothing was changed); "disabled" (the variable MLX_TROUPE_NO_BLAS is set); "native" (not a
            Linux machine: MLX brings what it needs).
        library: path or name of the library that was loaded; empty when none was.
        core: OpenBLAS's kernel name, "MKL", or empty.
        generic: the kernel does not use the processor's vector instructions.
        advice: what the user can do to make it faster; empty when nothing.
    """

    status: Literal["loaded", "bundled", "late", "disabled", "native"]
    library: str = ""
    core: str = ""
    generic: bool = False
    advice: str = ""


@functools.cache
def load_blas() -> BlasReport:
    """Load OpenBLAS or MKL for MLX where that helps; logs what it did. Never raises."""
    report = _load(sys.platform, os.environ, "mlx.core" in sys.modules)
    if report.status in ("bundled", "late") or report.generic:
        log.warning("BLAS: %s. %s", _describe(report), report.advice)
    elif report.status == "loaded":
        log.info("BLAS: %s", _describe(report))
    return report


@functools.cache
def most_threads() -> int | None:
    """Threads OpenBLAS began with; None where it is not in use or the user has chosen their number."""
    library = _openblas_in_use()
    if library is None or any(os.environ.get(name) for name in THREADS_VARIABLES):
        return None
    return int(library.openblas_get_num_threads())


def set_threads(threads: int) -> None:
    """How many threads OpenBLAS's next products use, at least 1; does nothing where it is not in use."""
    library = _openblas_in_use()
    if library is not None:
        library.openblas_set_num_threads(max(1, threads))


def _openblas_in_use() -> ctypes.CDLL | None:
    report = load_blas()
    if report.status != "loaded" or report.core == "MKL":
        return None
    library = _open(report.library)
    return library if library is not None and hasattr(library, "openblas_set_num_threads") else None


def _load(platform: str, environment: Mapping[str, str], mlx_imported: bool) -> BlasReport:
    if platform != "linux":
        return BlasReport(status="native")
    if environment.get(DISABLE_VARIABLE):
        return BlasReport(status="disabled", advice=f"Unset {DISABLE_VARIABLE} to use an installed BLAS.")
    if mlx_imported:
        return BlasReport(
            status="late",
            advice="mlx was imported before mlx_troupe, so its bundled BLAS stays. Call "
            "mlx_troupe.runtime.models.blas.load_blas() before the first import of mlx.",
        )
    return _load_openblas(environment) or _load_mkl() or BlasReport(status="bundled", advice=ADVICE)


def _describe(report: BlasReport) -> str:
    if report.status != "loaded":
        return f"MLX's bundled BLAS ({report.status})"
    return f"{report.library}, kernel {report.core}{' (generic)' if report.generic else ''}"


def _load_openblas(environment: Mapping[str, str]) -> BlasReport | None:
    if CORE_VARIABLE not in environment and (core := core_for(_processor_flags())):
        os.environ[CORE_VARIABLE] = core
    for name in OPENBLAS_NAMES:
        library = _open(name)
        if library is not None and hasattr(library, "cblas_sgemm"):
            return _openblas_report(name, _core_name(library))
    return None


def _openblas_report(name: str, core: str) -> BlasReport:
    generic = core.lower() in GENERIC_CORES
    advice = (
        f"OpenBLAS took the generic kernel {core}, several times slower than it could be. "
        f"Set {CORE_VARIABLE} (Haswell for AVX2, SkylakeX for AVX-512) or install a newer OpenBLAS."
    )
    return BlasReport(status="loaded", library=name, core=core, generic=generic, advice=advice if generic else "")


def _load_mkl() -> BlasReport | None:
    for name in _mkl_candidates():
        library = _open(name)
        if library is not None and hasattr(library, "cblas_sgemm"):
            return BlasReport(status="loaded", library=name, core="MKL")
    return None


def _mkl_candidates() -> list[str]:
    """MKL on the loader's path, then in this environment, where the PyPI package `mkl` puts it."""
    folders = [Path(sys.prefix) / "lib"]
    spec = importlib.util.find_spec("mkl")
    if spec is not None and spec.origin:
        folders.append(Path(spec.origin).parent)
    found = [path for folder in folders for path in sorted(glob.glob(f"{folder}/libmkl_rt.so*"))]
    return ["libmkl_rt.so", "libmkl_rt.so.2", *found]


def _open(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None


def _core_name(library: ctypes.CDLL) -> str:
    """OpenBLAS's name of the kernel in use; "unknown" when this build cannot tell."""
    try:
        function = library.openblas_get_corename
    except AttributeError:
        return "unknown"
    function.restype = ctypes.c_char_p
    name: bytes | None = function()
    return name.decode("ascii", "replace") if name else "unknown"


def core_for(flags: frozenset[str]) -> str:
    """The best OpenBLAS kernel these processor flags allow; empty: let OpenBLAS choose."""
    return next((core for flag, core in CORE_BY_FLAG if flag in flags), "")


def _processor_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
