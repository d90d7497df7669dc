"""What a model keeps per layer, learnt once from a two-token forward: kinds, shapes and dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..mlxlm import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

if TYPE_CHECKING:
    from collections.abc import Iterator


class UnbatchableCache(Exception):
    """A cache kind that rows cannot share a buffer for; the text names it."""


@dataclass(frozen=True)
class KVShape:
    """Keys (heads, key_size) and values (value_heads, value_size) of one token; `window` None sees everything."""

    window: int | None
    heads: int
    key_size: int
    key_dtype: mx.Dtype
    value_heads: int
    value_size: int
    value_dtype: mx.Dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.heads * self.key_size * self.key_dtype.size + (
            self.value_heads * self.value_size * self.value_dtype.size
        )


@dataclass(frozen=True)
class ArraysShape:
    """Recurrent state of one row: per entry the shape without the batch axis and the dtype; None is never set."""

    entries: tuple[tuple[tuple[int, ...], mx.Dtype] | None, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's state."""
        total = 0
        for entry in self.entries:
            if entry is not None:
                size = entry[1].size
                for axis in entry[0]:
                    size *= axis
                total += size
        return total


@dataclass(frozen=True)
class ListShape:
    """Several caches in one layer."""

    parts: tuple[LayerShape, ...]


LayerShape = KVShape | ArraysShape | ListShape


def learn_shapes(model: Any) -> list[LayerShape]:
    """Run two tokens through the model and read what its caches hold.

    Raises:
        UnbatchableCache: a layer's cache is of a kind that rows cannot share.
    """
    caches = make_prompt_cache(model)
    model(mx.array([[0, 0]]), cache=caches)
    return [_shape(cache) for cache in caches]


def _shape(cache: Any) -> LayerShape:
    kind = type(cache)
    if kind is CacheList:
        return ListShape(tuple(_shape(part) for part in cache.caches))
    if kind is ArraysCache:
        return ArraysShape(
            tuple(None if state is None else (tuple(state.shape[1:]), state.dtype) for state in cache.cache)
        )
    if kind is KVCache:
        return _kv_shape(cache, None)
    if kind is RotatingKVCache and cache.keep == 0:
        return _kv_shape(cache, cache.max_size)
    raise UnbatchableCache(f"{kind.__name__} cannot share a batch")


def _kv_shape(cache: Any, window: int | None) -> KVShape:
    keys, values = cache.keys, cache.values
    if keys is None:
        raise UnbatchableCache("a KV layer that the model never writes")
    return KVShape(window, keys.shape[1], keys.shape[3], keys.dtype, values.shape[1], values.shape[3], values.dtype)


def leaves(shapes: list[LayerShape]) -> Iterator[KVShape | ArraysShape]:
    """The shapes without their nesting, in layer order."""
    for shape in shapes:
        if isinstance(shape, ListShape):
            yield from leaves(list(shape.parts))
        else:
            yield shape


def pageable(shapes: list[LayerShape]) -> bool:
    """True when every layer's KV can be cut into pages of tokens."""
    return all(isinstance(shape, KVShape) and shape.window is None for shape in leaves(shapes))
