"""Freed memory is kept for the next step, where MLX has no buffer pool of its own: on a Linux processor.

There every array is a `malloc`. glibc gives what is freed back to the system soon, and takes it again, zeroed page by
page, for the next step: 20,000 page faults, 50 ms and more, for a warm prompt of 1,500 tokens on a 135M model. So it is
told to keep some, in one arena (arenas of threads give whole heaps back whatever they are told).

What is kept counts as MLX's pool does elsewhere: the memory-enforcer sees it as free, and has it given back under
pressure. The process is changed once, and not at all if its environment has settings of its own for malloc.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

KEPT_BYTES = 256 << 20
LARGEST_BYTES = 32 << 20
"""Larger blocks are the system's at once; the most that every glibc takes."""
RESERVE_BYTES = 192 << 20
RESERVE_SHARE = 16
"""A reserve takes at most such a part of what is available."""
_RESERVE_BLOCK_BYTES = 16 << 20
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # malloc.h
_INFO_FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in _INFO_FIELDS]


@functools.cache
def keep_freed() -> bool:
    """Have freed memory kept from now on; False, and nothing happens, where that cannot be or is the user's affair."""
    library = _glibc(sys.platform, os.environ)
    if library is None:
        return False
    settings = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, LARGEST_BYTES), (_TRIM_THRESHOLD, KEPT_BYTES))
    taken = sum(library.mallopt(name, value) for name, value in settings) == len(settings)
    logger.info("malloc keeps up to %d MiB of freed memory: %s", KEPT_BYTES >> 20, "yes" if taken else "in part")
    return bool(taken)


@functools.cache
def reserve(most_bytes: int) -> int:
    """Have some memory of the system before it is needed: at most `most_bytes`; returns how much.

    The system's pages cost 3 us each on first use, and prefixes that come back from disk take tens of thousands at
    once: a fifth of the first answer after a restart.
    """
    library = _glibc(sys.platform, os.environ)
    if library is None or not keep_freed():
        return 0
    size = min(most_bytes, RESERVE_BYTES, psutil.virtual_memory().available // RESERVE_SHARE)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    blocks = [library.malloc(_RESERVE_BLOCK_BYTES) for _ in range(size // _RESERVE_BLOCK_BYTES)]
    for block in blocks:
        if block:
            ctypes.memset(block, 1, _RESERVE_BLOCK_BYTES)
    for block in blocks:
        library.free(block)
    return len(blocks) * _RESERVE_BLOCK_BYTES


def kept_bytes() -> int:
    """Freed bytes that `give_back` would return, at least; 0 where that is not known."""
    library = _glibc(sys.platform, os.environ)
    if library is None or not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _MallocInfo
    return int(library.mallinfo2().keepcost)


def give_back() -> None:
    """Return freed memory to the system."""
    library = _glibc(sys.platform, os.environ)
    if library is not None:
        library.malloc_trim(0)


def _glibc(platform: str, environment: Mapping[str, str]) -> ctypes.CDLL | None:
    """The C library, where it is glibc and its malloc is nobody else's affair."""
    if platform != "linux" or "GLIBC_TUNABLES" in environment:
        return None
    if any(name.startswith("MALLOC_") for name in environment):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
