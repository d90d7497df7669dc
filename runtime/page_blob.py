"""A page of KV as plain bytes: what crosses from the MLX thread to the disk and back. No array leaves its thread."""

from __future__ import annotations

import msgspec


class ArraySpec(msgspec.Struct, frozen=True, array_like=True):
    """One array: MLX's name of its dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]


class StateSpec(msgspec.Struct, frozen=True, array_like=True):
    """A layer's uncuttable state: numbers of the cache object, and its arrays (None where it has none)."""

    meta: tuple[int, ...]
    arrays: tuple[ArraySpec | None, ...]


class PageLayout(msgspec.Struct, frozen=True):
    """What a page's buffers are.

    Attributes:
        low, high: tokens low .. high - 1 of the prompt.
        kv: per cuttable layer its arrays, tokens on axis 2.
        state: per uncuttable layer its state at `high`; None when the page has no checkpoint.
    """

    low: int
    high: int
    kv: tuple[tuple[ArraySpec, ...], ...]
    state: tuple[StateSpec, ...] | None = None

    def specs(self) -> list[ArraySpec]:
        """All arrays, in the order of the buffers."""
        out = [spec for layer in self.kv for spec in layer]
        out += [spec for layer in self.state or () for spec in layer.arrays if spec is not None]
        return out


class PageBlob(msgspec.Struct, frozen=True):
    """Layout and bytes. Buffers may be views of evaluated arrays, which they keep alive; read them, then drop them."""

    layout: PageLayout
    buffers: tuple[memoryview | bytes, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(len(buffer) for buffer in self.buffers)
