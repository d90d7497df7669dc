"""One layer's state for all rows of a group, behind the face mlx-lm's models expect of a cache.

Every change to rows is made in two halves: a method that returns the new arrays (lazy, nothing assigned), and `adopt`
that takes them on. A group makes all layers' new arrays first, so a failing layer leaves every row as it was.
Owned by the MLX thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..mlxlm import ArraysCache, CacheList
from .deferred import DeferredMask, RaggedKV
from .shapes import ArraysShape, KVShape, LayerShape

if TYPE_CHECKING:
    import numpy as np

    from ..kernels import RaggedAttention
    from .plane import Move
    from .view import GroupView, PlaneView

KVPair = tuple[mx.array, mx.array]

if TYPE_CHECKING:

    class _RecurrentCache:
        """What ArraysCache is, for the type checker: mlx-lm is untyped."""

        cache: list[mx.array | None]

        def __init__(self, size: int) -> None: ...

else:
    _RecurrentCache = ArraysCache


class KVRows:
    """Keys and values (slots, heads, capacity, size) of one attention layer.

    Has no `__len__` and no `bits`: models test for both.
    """

    def __init__(self, shape: KVShape, slots: int, kernel: RaggedAttention | None = None) -> None:
        self.shape = shape
        self.kernel = kernel
        self.keys = mx.zeros((slots, shape.heads, 0, shape.key_size), shape.key_dtype)
        self.values = mx.zeros((slots, shape.value_heads, 0, shape.value_size), shape.value_dtype)
        self.view: GroupView | None = None
        self._deferred: RaggedKV | None = None

    @property
    def offset(self) -> mx.array:
        """Position of the next token of each slot, int32 (slots,)."""
        assert self.view is not None
        return self.view.offset

    @property
    def plane_view(self) -> PlaneView:
        """This layer's places in the current forward."""
        assert self.view is not None
        return self.view.plane(self.shape.window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Take in (slots, heads, tokens, size) at the cursor; returns all that live queries may see, or a stand-in."""
        if self._defers:
            assert self.kernel is not None
            self._deferred = RaggedKV(self, self.kernel, keys, values)
        else:
            self.write(keys, values)
        return self.keys_and_values()

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Write (slots, heads, tokens, size) at the cursor."""
        plane = self.plane_view
        self.keys[:, :, plane.cursor : plane.high] = keys
        self.values[:, :, plane.cursor : plane.high] = values

    def keys_and_values(self) -> tuple[Any, Any]:
        """What `update_and_fetch` returned; also for layers that borrow this one's."""
        if self._defers:
            return self._deferred, self._deferred
        return self.arrays_in_view()

    def arrays_in_view(self) -> KVPair:
        """All that live queries of this forward may see, as arrays."""
        plane = self.plane_view
        return self.keys[:, :, plane.low : plane.high], self.values[:, :, plane.low : plane.high]

    def make_mask(self, tokens: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """See `PlaneView.mask`; a stand-in where a ragged kernel will do without one."""
        if self._defers and not return_array:
            return DeferredMask(window_size)
        return self.plane_view.mask(window_size, as_array=return_array)

    @property
    def _defers(self) -> bool:
        return self.kernel is not None and self.plane_view.takes_kernel

    def moved(self, move: Move) -> KVPair:
        """The arrays after a repack."""
        return _moved(self.keys, move), _moved(self.values, move)

    def joined(self, base: KVPair, slot: int, keys: mx.array, values: mx.array, place: int) -> KVPair:
        """`base` with a row's (1, heads, count, size) written at `place` of `slot`, and zeros everywhere else in it.

        What a row before it left there is masked, but a NaN would poison attention all the same.
        """
        return _written(base[0], slot, place, keys), _written(base[1], slot, place, values)

    def selected(self, slots: list[int | None]) -> KVPair:
        """The arrays of other slots; None is a fresh one (zeros: an unseen NaN would poison attention)."""
        return _selected(self.keys, slots), _selected(self.values, slots)

    def adopt(self, arrays: KVPair) -> None:
        """Take on new arrays."""
        self.keys, self.values = arrays

    def row(self, slot: int, low: int, high: int) -> KVPair:
        """Places low .. high - 1 of one slot, copied: (1, heads, high - low, size)."""
        part = slice(slot, slot + 1)
        return mx.contiguous(self.keys[part, :, low:high]), mx.contiguous(self.values[part, :, low:high])

    def view_of(self, slot: int, low: int, high: int) -> KVPair:
        """Places low .. high - 1 of one slot, lazy and not copied: copy before the next write."""
        return self.keys[slot : slot + 1, :, low:high], self.values[slot : slot + 1, :, low:high]

    def part(self, low: int, high: int) -> KVPair:
        """Places low .. high - 1 of all slots, copied."""
        return mx.contiguous(self.keys[:, :, low:high]), mx.contiguous(self.values[:, :, low:high])

    def put(self, part: KVPair, low: int) -> None:
        """Write back what `part` gave."""
        high = low + part[0].shape[2]
        self.keys[:, :, low:high], self.values[:, :, low:high] = part

    def arrays(self) -> list[mx.array]:
        """What the layer holds."""
        return [self.keys, self.values]


class ArraysRows(_RecurrentCache):
    """Recurrent state (slots, ...) of one layer, a fixed slot a row."""

    def __init__(self, shape: ArraysShape, slots: int) -> None:
        super().__init__(len(shape.entries))
        self.shape = shape
        self.cache = [None if entry is None else mx.zeros((slots, *entry[0]), entry[1]) for entry in shape.entries]

    def joined(self, slot: int, states: list[mx.array | None]) -> list[mx.array | None]:
        """The arrays with one row's states (1, ...) written to `slot`; a missing state is zeros."""
        out: list[mx.array | None] = []
        for mine, state in zip(self.cache, states, strict=True):
            if mine is None:
                out.append(None)
            else:
                fresh = mx.zeros((1, *mine.shape[1:]), mine.dtype) if state is None else state
                twin = mx.array(mine)
                twin[slot : slot + 1] = fresh.astype(mine.dtype)
                out.append(twin)
        return out

    def selected(self, slots: list[int | None]) -> list[mx.array | None]:
        """The arrays of other slots; None is a fresh one."""
        return [None if state is None else _selected(state, slots) for state in self.cache]

    def adopt(self, arrays: list[mx.array | None]) -> None:
        """Take on new arrays."""
        self.cache = arrays

    def row(self, slot: int) -> list[mx.array | None]:
        """One slot's states, copied: a plain slice would keep the whole batch alive."""
        return [None if state is None else mx.contiguous(state[slot : slot + 1]) for state in self.cache]

    def arrays(self) -> list[mx.array]:
        """What the layer holds."""
        return [state for state in self.cache if state is not None]


Store = KVRows | ArraysRows


def build_layers(
    shapes: list[LayerShape], slots: int, kernel: RaggedAttention | None = None
) -> tuple[list[Any], list[Store]]:
    """Empty state for a group: the list to hand to the model, and the same stores without nesting."""
    flat: list[Store] = []
    return [_build_layer(shape, slots, kernel, flat) for shape in shapes], flat


def _build_layer(shape: LayerShape, slots: int, kernel: RaggedAttention | None, flat: list[Store]) -> Any:
    """One layer; its stores are added to `flat`.

    Not a closure: one that names itself is a cycle, and would keep a dead group's buffers until a garbage collection.
    """
    if isinstance(shape, KVShape):
        flat.append(KVRows(shape, slots, kernel))
        return flat[-1]
    if isinstance(shape, ArraysShape):
        flat.append(ArraysRows(shape, slots))
        return flat[-1]
    return CacheList(*(_build_layer(part, slots, kernel, flat) for part in shape.parts))


def _moved(array: mx.array, move: Move) -> mx.array:
    slots, heads, _, size = array.shape
    out = mx.zeros((slots, heads, move.capacity, size), array.dtype)
    if move.count == 0:
        return out
    straight = array[:, :, move.source : move.source + move.count]
    part = straight if move.gather is None else _gathered(array, move.gather)
    out[:, :, move.target : move.target + move.count] = part
    return out


def _written(base: mx.array, slot: int, place: int, new: mx.array) -> mx.array:
    """`base` with a slot that holds a row's entries and nothing else, `base` itself unchanged.

    Item assignment on a twin: it donates once `base` is dropped, and is 6 to 20 times faster on CUDA than
    `mx.slice_update` with a start array (which copies the buffer there).
    """
    twin = mx.array(base)
    behind = base.shape[2] - place - new.shape[2]
    twin[slot : slot + 1] = mx.pad(new, [(0, 0), (0, 0), (place, behind), (0, 0)])
    return twin


def _gathered(array: mx.array, gather: np.ndarray) -> mx.array:
    index = mx.array(gather.astype("int32"))[:, None, :, None]
    slots, heads, _, size = array.shape
    return mx.take_along_axis(array, mx.broadcast_to(index, (slots, heads, gather.shape[1], size)), axis=2)


def _selected(array: mx.array, slots: list[int | None]) -> mx.array:
    kept = [slot for slot in slots if slot is not None]
    fresh = len(slots) - len(kept)
    old = array.shape[0]
    if kept == list(range(old)) and slots[: len(kept)] == kept:
        parts = [array]
    elif not kept:
        return mx.zeros((len(slots), *array.shape[1:]), array.dtype)
    else:
        index = [slot if slot is not None else 0 for slot in slots]
        taken = array[mx.array(index, dtype=mx.int32)]
        if fresh == 0:
            return taken
        live = mx.array([slot is not None for slot in slots])
        return mx.where(live.reshape(-1, *[1] * (array.ndim - 1)), taken, mx.array(0, array.dtype))
    if fresh:
        parts.append(mx.zeros((fresh, *array.shape[1:]), array.dtype))
    return mx.concatenate(parts, axis=0) if len(parts) > 1 else parts[0]
