"""Attention kernels of our own, registered per backend; the plain path is their fallback and their oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..device import backend

if TYPE_CHECKING:
    import mlx.core as mx


class RaggedAttention(Protocol):
    """Decode attention over rows of different lengths that share a write cursor."""

    def fits(self, heads: int, kv_heads: int, head_dim: int, value_dim: int, dtype: mx.Dtype) -> bool:
        """Whether the kernel can take these shapes."""
        ...

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, starts: mx.array, low: int, high: int, scale: float
    ) -> mx.array:
        """Attention of one query a row.

        Args:
            queries: (rows, heads, 1, head_dim).
            keys: (rows, kv_heads, capacity, head_dim), and values alike.
            starts: int32 (rows,), first place each row sees; low <= starts < high.
            low: least of the starts of live rows.
            high: one more than the last place, which every row sees.
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
