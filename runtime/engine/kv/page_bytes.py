"""Pages to bytes and back, on the MLX thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from ...page_blob import ArraySpec, PageBlob, PageLayout, StateSpec
from .pages import LayerState, StoredPage, owned

if TYPE_CHECKING:
    from collections.abc import Iterator

DTYPES = {
    str(dtype).removeprefix("mlx.core."): dtype
    for dtype in (
        mx.float32, mx.float16, mx.bfloat16, mx.int8, mx.int16, mx.int32, mx.int64, mx.uint8, mx.uint16, mx.uint32,
        mx.uint64,
    )
}  # fmt: skip
"""Arrays of these can be written; a model with others keeps its pages in RAM."""


def to_blob(page: StoredPage) -> PageBlob:
    """The page's bytes, as views where the backend has its arrays in reach of the host. `page` is evaluated."""
    kv = tuple(tuple(_spec(array) for array in layer) for layer in page.kv)
    state = None
    if page.state is not None:
        state = tuple(
            StateSpec(layer.meta, tuple(None if array is None else _spec(array) for array in layer.arrays))
            for layer in page.state
        )
    return PageBlob(PageLayout(page.low, page.high, kv, state), tuple(_bytes(array) for array in page.arrays()))


def from_blob(blob: PageBlob) -> StoredPage:
    """A page of those bytes, evaluated: the buffers may go.

    Raises:
        ValueError: buffers and layout do not agree.
    """
    layout = blob.layout
    specs = layout.specs()
    if len(specs) != len(blob.buffers):
        raise ValueError(f"{len(blob.buffers)} buffers for {len(specs)} arrays")
    arrays = iter([_array(spec, buffer) for spec, buffer in zip(specs, blob.buffers, strict=True)])
    kv = [tuple(next(arrays) for _ in layer) for layer in layout.kv]
    state = None
    if layout.state is not None:
        state = [LayerState(layer.meta, _state_arrays(layer, arrays)) for layer in layout.state]
    return owned(StoredPage(layout.low, layout.high, kv, state))


def _state_arrays(layer: StateSpec, arrays: Iterator[mx.array]) -> tuple[mx.array | None, ...]:
    return tuple(None if spec is None else next(arrays) for spec in layer.arrays)


def _spec(array: mx.array) -> ArraySpec:
    name = str(array.dtype).removeprefix("mlx.core.")
    if name not in DTYPES:
        raise ValueError(f"arrays of {name} cannot be written")
    return ArraySpec(name, tuple(array.shape))


def _bytes(array: mx.array) -> memoryview | bytes:
    return memoryview(array).cast("B") if array.size else b""  # type: ignore[arg-type]  # it has the buffer protocol


def _array(spec: ArraySpec, buffer: memoryview | bytes) -> mx.array:
    dtype = DTYPES.get(spec.dtype)
    count = int(np.prod(spec.shape, dtype=np.int64))
    if dtype is None or min(spec.shape, default=0) < 0 or len(buffer) != count * dtype.size:
        raise ValueError(f"{len(buffer)} bytes for {spec}")
    if not count:
        return mx.zeros(spec.shape, dtype)
    return mx.array(np.frombuffer(buffer, np.uint8)).view(dtype).reshape(spec.shape)
