"""What the memory-enforcer hears."""

from __future__ import annotations

import msgspec


class MemorySample(msgspec.Struct, frozen=True, tag=True):
    """MLX's counters, in bytes, read on its thread."""

    active_bytes: int
    pool_bytes: int
    peak_bytes: int
    read_s: float


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Time to look."""


MemoryEnforcerMessage = MemorySample | Tick
