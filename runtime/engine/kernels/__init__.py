"""Attention kernels of our own, registered per backend; the plain path is their fallback and their oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..device import backend

if TYPE_CHECKING:
    import mlx.core as mx


class RaggedAttention(Protocol):
    """Decode attention over rows of different lengths that share a write cursor; writes the new entry itself."""

    def fits(self, heads: int, kv_heads: int, head_dim: int, value_dim: int, dtype: mx.Dtype) -> bool:
        """Whether the kernel can take these shapes."""
        ...

    def splits(self, rows: int, kv_heads: int, longest: int) -> int:
        """How many blocks should share a row whose longest is so many places."""
        ...

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        new_keys: mx.array,
        new_values: mx.array,
        starts: mx.array,
        place: mx.array,
        splits: int,
        scale: float,
    ) -> mx.array:
        """Attention of one query a row, and the new key and value written at the cursor, in place.

        Args:
            queries: (rows, heads, 1, head_dim).
            keys: (rows, kv_heads, capacity, head_dim), and values alike; changed at the cursor.
            new_keys: (rows, kv_heads, 1, head_dim), and new_values alike.
            starts: int32 (rows,), first place each row sees.
            place: int32 (2,): capacity, and cursor, the last place every row sees.
            splits: from `splits`.
            scale: of the scores.

        Returns:
            (rows, heads, 1, head_dim).
        """
        ...


def ragged_attention() -> RaggedAttention | None:
    """The kernel for this device, if there is one."""
    if backend() != "cuda":
        return None
    from .ragged_cuda import CudaRaggedAttention

    return CudaRaggedAttention()
