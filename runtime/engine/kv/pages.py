"""Pages: pieces of one row's KV on their own, and checkpoints of the state that cannot be cut.

Each kind of mlx-lm cache is either cuttable (plain, quantised: any run of tokens can be taken out, in its own form) or
not (sliding windows, chunks, recurrent arrays: only its state at the row's present end can be kept). Owned by the MLX
thread.

Invariants (each has a test of its name):
- `stored_pages_alias_nothing`: every array of a page owns its memory and is evaluated when it is made.
- `a_checkpoint_is_never_mislabelled`: it is taken only when every layer that knows its position is at `high`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..mlxlm import ArraysCache, CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Arrays = tuple[mx.array, ...]
PageForm = tuple[tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...], ...]
CUTTABLE = (KVCache, QuantizedKVCache)
UNCUTTABLE = (RotatingKVCache, ChunkedKVCache, ArraysCache)


@dataclass(frozen=True)
class LayerState:
    """An uncuttable layer: numbers of its cache object, and arrays."""

    meta: tuple[int, ...]
    arrays: tuple[mx.array | None, ...]


@dataclass(frozen=True)
class StoredPage:
    """Tokens low .. high - 1: per cuttable layer its arrays (tokens on axis 2); per uncuttable one its state at high.

    `state` is None for a page without a checkpoint.
    """

    low: int
    high: int
    kv: list[Arrays]
    state: list[LayerState] | None = None

    def arrays(self) -> Iterator[mx.array]:
        """All arrays, in the order of their bytes in a blob."""
        for layer in self.kv:
            yield from layer
        for state in self.state or ():
            yield from (array for array in state.arrays if array is not None)


def copied(array: mx.array) -> mx.array:
    """The same bits in memory of their own. `mx.contiguous` shares a buffer that is not much larger."""
    return mx.where(mx.array(True), array, mx.array(0, array.dtype))


def leaf_caches(caches: Sequence[Any]) -> Iterator[Any]:
    """The caches without their nesting, in layer order."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaf_caches(cache.caches)
        else:
            yield cache


def unstorable(caches: Sequence[Any]) -> str | None:
    """Why rows with such caches cannot be kept; None when they can."""
    for cache in leaf_caches(caches):
        if type(cache) not in CUTTABLE + UNCUTTABLE:
            return f"{type(cache).__name__} has no stored form"
    return None


def has_state(caches: Sequence[Any]) -> bool:
    """Whether some layer cannot be cut."""
    return any(isinstance(cache, UNCUTTABLE) for cache in leaf_caches(caches))


def cut(caches: Sequence[Any], low: int, high: int, *, checkpoint: bool = False) -> StoredPage:
    """Take tokens low .. high - 1 out of a row's caches, copied and evaluated.

    Raises:
        ValueError: the row has fewer tokens, or (with `checkpoint`) a layer stands elsewhere than at `high`.
    """
    kv = [_slice(cache, low, high) for cache in leaf_caches(caches) if isinstance(cache, CUTTABLE) and _used(cache)]
    state = _checkpoint(caches, high) if checkpoint else None
    return owned(StoredPage(low, high, kv, state))


def owned(page: StoredPage) -> StoredPage:
    """The page, its arrays evaluated."""
    mx.eval(list(page.arrays()))
    return page


def restore(caches: Sequence[Any], pages: Sequence[StoredPage], tokens: int, room: int = 0) -> None:
    """Fill fresh caches from stored pages, of which the first `tokens` tokens are taken; lazy.

    Args:
        room: tokens that the buffers of plain caches have room for, if that is more.

    Raises:
        ValueError: the pages hold fewer tokens, or no checkpoint where one is needed.
    """
    last = pages[-1]
    if last.high < tokens or last.low >= tokens:
        raise ValueError(f"the pages hold {last.high} tokens, not {tokens}")
    leaves = list(leaf_caches(caches))
    stateful = [cache for cache in leaves if isinstance(cache, UNCUTTABLE)]
    if stateful and (last.state is None or last.high != tokens):
        raise ValueError(f"no checkpoint at {tokens}")
    for place, cache in enumerate([cache for cache in leaves if isinstance(cache, CUTTABLE)][: len(last.kv)]):
        parts = [page.kv[place] for page in pages[:-1]]
        parts.append(tuple(array[:, :, : tokens - last.low] for array in last.kv[place]))
        wide = room if type(cache) is KVCache else 0
        _put(cache, [_joined(column, wide) for column in zip(*parts, strict=True)], tokens)
    for cache, state in zip(stateful, last.state or (), strict=True):
        _put_state(cache, state)


def form_of(page: StoredPage) -> PageForm:
    """What all pages of a model have in common: per layer dtypes and the axes that do not grow with tokens."""
    return tuple(tuple((str(a.dtype), a.shape[:2], a.shape[3:]) for a in layer) for layer in page.kv)


def positions(caches: Sequence[Any]) -> list[int]:
    """Where each layer that knows stands."""
    return [int(cache.offset) for cache in leaf_caches(caches) if not isinstance(cache, ArraysCache) and _used(cache)]


def token_bytes(caches: Sequence[Any]) -> int:
    """Bytes of a token in the cuttable layers of caches that hold at least one."""
    layers = [_slice(cache, 0, 1) for cache in leaf_caches(caches) if isinstance(cache, CUTTABLE) and _used(cache)]
    return sum(array.nbytes for layer in layers for array in layer)


def checkpoint_bytes(caches: Sequence[Any]) -> int:
    """Most bytes of a checkpoint, from caches that hold at least one token."""
    total = 0
    for cache in leaf_caches(caches):
        if isinstance(cache, ArraysCache):
            total += sum(state.nbytes for state in cache.cache if state is not None)
        elif isinstance(cache, UNCUTTABLE) and _used(cache):
            limit = cache.max_size if isinstance(cache, RotatingKVCache) else cache.chunk_size
            total += limit * (cache.keys[:, :, :1].nbytes + cache.values[:, :, :1].nbytes)
    return total


def _used(cache: Any) -> bool:
    """Some models make caches that they never write."""
    return isinstance(cache, ArraysCache) or cache.keys is not None


def _slice(cache: Any, low: int, high: int) -> Arrays:
    if high > cache.offset:
        raise ValueError(f"a piece ends at {high}, the row at {cache.offset}")
    parts = (cache.keys, cache.values)
    if isinstance(cache, QuantizedKVCache):
        parts = (*cache.keys, *cache.values)
    return tuple(copied(part[:, :, low:high]) for part in parts)


def widened(array: mx.array, room: int) -> mx.array:
    """(1, heads, tokens, size) with zeros behind, in a buffer of `room` tokens."""
    return _joined([array], room)


def _joined(parts: Sequence[mx.array], room: int = 0) -> mx.array:
    """The parts one behind the other in memory of their own, and zeros behind them up to `room` tokens."""
    first = parts[0]
    spare = room - sum(part.shape[2] for part in parts)
    if spare > 0:
        parts = [*parts, mx.zeros((*first.shape[:2], spare, *first.shape[3:]), first.dtype)]
    return mx.concatenate(list(parts), axis=2) if len(parts) > 1 else copied(first)


def _put(cache: Any, arrays: Sequence[mx.array], tokens: int) -> None:
    if isinstance(cache, QuantizedKVCache):
        half = len(arrays) // 2
        cache.keys, cache.values = tuple(arrays[:half]), tuple(arrays[half:])
    else:
        cache.keys, cache.values = arrays
    cache.offset = tokens


def _checkpoint(caches: Sequence[Any], high: int) -> list[LayerState]:
    elsewhere = {position for position in positions(caches) if position != high}
    if elsewhere:
        raise ValueError(f"layers stand at {sorted(elsewhere)}, not at {high}")
    return [_layer_state(cache) for cache in leaf_caches(caches) if isinstance(cache, UNCUTTABLE)]


def _layer_state(cache: Any) -> LayerState:
    if isinstance(cache, ArraysCache):
        return LayerState((), tuple(None if state is None else copied(state) for state in cache.cache))
    if cache.keys is None:
        return LayerState((0,), (None, None))
    if isinstance(cache, RotatingKVCache):
        keys, values = cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
        low = max(0, keys.shape[2] - cache.max_size) if cache.keep == 0 else 0
        return LayerState((cache.offset,), (copied(keys[:, :, low:]), copied(values[:, :, low:])))
    held = cache.offset - cache.start_position
    low = max(0, held - cache.chunk_size)
    parts = (copied(cache.keys[:, :, low:held]), copied(cache.values[:, :, low:held]))
    return LayerState((cache.offset, cache.start_position + low), parts)


def _put_state(cache: Any, state: LayerState) -> None:
    arrays = [None if array is None else copied(array) for array in state.arrays]
    if isinstance(cache, ArraysCache):
        cache.cache = arrays
        return
    cache.keys, cache.values = arrays
    cache.offset = state.meta[0]
    if isinstance(cache, RotatingKVCache):
        cache._idx = 0 if arrays[0] is None else arrays[0].shape[2]
    elif len(state.meta) > 1:
        cache.start_position = state.meta[1]
