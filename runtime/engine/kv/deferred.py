"""Stand-ins for keys, values and masks that a model hands on untouched from its cache to the attention seam."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..mlxlm import solo_attention

if TYPE_CHECKING:
    import mlx.core as mx

    from ..kernels import RaggedAttention
    from .stores import KVRows


class DeferredMask:
    """Stands for a mask nobody may need; remembers the window the model asked for."""

    def __init__(self, window: int | None) -> None:
        self.window = window


class MaskedFallback(Exception):
    """While a step is traced: a layer cannot take the kernel."""


class RaggedKV:
    """Keys and values of rows of different lengths, for a kernel that needs no mask and writes the new entry.

    Args:
        store: the layer.
        kernel: attends where it fits; elsewhere the entry is written and attention masked.
        new_keys, new_values: (slots, heads, 1, size) of this step.
    """

    def __init__(self, store: KVRows, kernel: RaggedAttention, new_keys: mx.array, new_values: mx.array) -> None:
        self._store = store
        self._kernel = kernel
        self._new = (new_keys, new_values)

    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """Attention of (rows, heads, 1, size) queries."""
        store, window = self._store, mask.window if isinstance(mask, DeferredMask) else None
        shape, plane = store.shape, store.plane_view
        fits = self._kernel.fits(queries.shape[1], shape.heads, shape.key_size, shape.value_size, shape.key_dtype)
        if fits and sinks is None and shape.value_dtype == shape.key_dtype == queries.dtype:
            splits = plane.splits(self._kernel, shape.heads)
            starts = plane.starts(window)
            return self._kernel(queries, store.keys, store.values, *self._new, starts, plane.place, splits, scale)
        if plane.traced:
            raise MaskedFallback(f"{queries.shape[1]} heads of {shape.key_size}, sinks: {sinks is not None}")
        store.write(*self._new)
        keys, values = store.arrays_in_view()
        seen = plane.mask(window, as_array=False)
        return solo_attention(queries, keys, values, cache=None, scale=scale, mask=seen, sinks=sinks)
