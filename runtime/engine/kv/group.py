"""Rows of similar length that share buffers and write cursors: one length class of the batch.

Invariant `all_or_nothing`: join, leave, rewind, grow and move make every layer's new arrays before any is assigned.
Owned by the MLX thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

from .pages import copied, leaf_caches
from .plane import Move, Plane, room_for
from .shapes import KVShape, LayerShape, leaves
from .staged import newest
from .stores import ArraysRows, KVRows, build_layers
from .view import GroupView

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..kernels import RaggedAttention
    from .staged import StagedRow
    from .stores import KVPair, Store

SLOT_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
IDLE_STEPS_BEFORE_SHRINK = 16

RowState = list["KVPair | list[mx.array | None]"]
"""One row's state per layer: newest (keys, values) oldest first, or recurrent states."""


class GroupSnapshot(NamedTuple):
    """What `RowGroup.roll_back` needs: newest KV of each layer, recurrent states, geometry and lengths."""

    tails: list[KVPair]
    states: list[list[mx.array | None]]
    planes: dict[int | None, Plane]
    lengths: np.ndarray


def slots_for(rows: int) -> int:
    """The least bucket that holds `rows`: few batch shapes, so buffers and compiled graphs are reused."""
    return next((bucket for bucket in SLOT_BUCKETS if bucket >= rows), -(-rows // 64) * 64)


class RowGroup:
    """A batch of slots, each free or holding one row.

    Attributes:
        rows: row number per slot, None when free.
        lengths: tokens of each slot's row, 0 when free.
        layers: what the model gets as its cache.
    """

    def __init__(self, shapes: list[LayerShape], slots: int = 1, kernel: RaggedAttention | None = None) -> None:
        self._shapes = shapes
        self.rows: list[int | None] = [None] * slots
        self.lengths = np.zeros(slots, np.int64)
        self.live = np.zeros(slots, bool)
        self.layers, self.stores = build_layers(shapes, slots, kernel)
        windows = {shape.window for shape in leaves(shapes) if isinstance(shape, KVShape)}
        self.planes = {window: Plane(slots, window) for window in windows}
        self._sparse_steps = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(self.lengths.max(initial=0))

    @property
    def count(self) -> int:
        """Live rows."""
        return int(self.live.sum())

    # --- membership ---------------------------------------------------------------------------------------------

    def reserve(self, rows: int, longest: int) -> None:
        """Make room for so many more rows of up to `longest` tokens at once, instead of at each join."""
        slots = slots_for(self.count + rows)
        if slots > len(self.rows):
            self._fit()
            self.select([*range(len(self.rows)), *[None] * (slots - len(self.rows))])
        moves = {window: self._room_for(plane, plane.entries(longest)) for window, plane in self.planes.items()}
        if any(moves.values()):
            self._adopt([self._move_only(store, moves) for store in self.stores], moves)

    def join(self, row: int, length: int, state: RowState, staged: StagedRow | None = None) -> int:
        """Give a row a slot and copy its state in. Returns the slot.

        Args:
            state: of each layer.
            staged: where it comes from. A group of one free slot takes over buffers of it that fit, uncopied.
        """
        slot = self._free_slot()
        taken = {} if staged is None else self._takes_over(staged)
        moves = {window: self._room_for(plane, plane.entries(length)) for window, plane in self.planes.items()}
        if taken:
            capacity = next(iter(taken.values()))[0].shape[2]
            moves[None] = Move(capacity, 0, 0, length)
        made = [
            taken[place] if place in taken else self._joined(store, slot, part, moves)
            for place, (store, part) in enumerate(zip(self.stores, state, strict=True))
        ]
        self._adopt(made, moves)
        for window, plane in self.planes.items():
            plane.place(slot, length, self._entries(state, window))
        self.rows[slot], self.lengths[slot], self.live[slot] = row, length, True
        return slot

    def _takes_over(self, staged: StagedRow) -> dict[int, KVPair]:
        """By layer, the buffers of a staged row that can be this group's own; all that see every token, or none.

        Under names of their own (`mx.array` would copy): item assignment would change the staged row's array too.
        """
        if self.rows != [None]:
            return {}
        caches = list(leaf_caches(staged.caches))
        plain = [place for place, store in enumerate(self.stores) if _sees_everything(store)]
        pairs = {place: (caches[place].keys, caches[place].values) for place in plain}
        rooms = {0 if array is None else array.shape[2] for pair in pairs.values() for array in pair}
        if rooms != {room_for(staged.length)}:  # as large as the group would make them
            return {}
        return {
            place: (keys.astype(keys.dtype), values.astype(values.dtype)) for place, (keys, values) in pairs.items()
        }

    def _entries(self, state: RowState, window: int | None) -> int:
        for store, part in zip(self.stores, state, strict=True):
            if isinstance(store, KVRows) and store.shape.window == window:
                keys: Any = part[0]
                return int(keys.shape[2])
        raise KeyError(window)

    def staged_state(self, staged: StagedRow) -> RowState:
        """What this group keeps of a staged row."""
        out: RowState = []
        for store, cache in zip(self.stores, leaf_caches(staged.caches), strict=True):
            if isinstance(store, KVRows):
                count = self.planes[store.shape.window].entries(staged.length)
                out.append(newest(cache, count) if count else (store.keys[:1, :, :0], store.values[:1, :, :0]))
            else:
                out.append(list(cache.cache))
        return out

    def _joined(self, store: Store, slot: int, part: Any, moves: dict[int | None, Move | None]) -> Any:
        if not isinstance(store, KVRows):
            return store.joined(slot, part)
        move = moves[store.shape.window]
        base = (store.keys, store.values) if move is None else store.moved(move)
        cursor = self.planes[store.shape.window].cursor if move is None else move.target + move.count
        return store.joined(base, slot, part[0], part[1], cursor - part[0].shape[2])

    def leave(self, row: int) -> None:
        """Free a row's slot. Its KV stays in the buffer, unseen, until it is overwritten."""
        slot = self.rows.index(row)
        self.rows[slot], self.lengths[slot], self.live[slot] = None, 0, False
        for plane in self.planes.values():
            plane.clear(slot)

    def extract(self, row: int) -> tuple[int, RowState]:
        """A row's length and state, copied, to join another group. The row stays."""
        self._close_holes()
        slot = self.rows.index(row)
        out: RowState = []
        for store in self.stores:
            if isinstance(store, KVRows):
                plane = self.planes[store.shape.window]
                out.append(store.row(slot, plane.cursor - int(plane.span[slot]), plane.cursor))
            else:
                out.append(store.row(slot))
        return int(self.lengths[slot]), out

    def export(self, row: int, low: int, high: int) -> list[KVPair]:
        """Tokens low .. high - 1 of a row, per KV layer, copied. Only for models that keep every token.

        Raises:
            ValueError: the row has fewer tokens.
        """
        slot = self.rows.index(row)
        if high > self.lengths[slot]:
            raise ValueError(f"row {row} has {self.lengths[slot]} tokens, not {high}")
        self._close_holes()
        shift = self.planes[None].cursor - int(self.lengths[slot])
        return [
            (copied(part[0]), copied(part[1]))
            for store in self.stores
            if isinstance(store, KVRows)
            for part in [store.view_of(slot, low + shift, high + shift)]
        ]

    # --- the forward --------------------------------------------------------------------------------------------

    def snapshot(self, tokens: int) -> GroupSnapshot:
        """All that taking back and replaying the newest `tokens` tokens changes, copied; evaluates."""
        kv = [store for store in self.stores if isinstance(store, KVRows)]
        cursors = [self.planes[store.shape.window].cursor for store in kv]
        tails = [store.part(cursor - tokens, cursor) for store, cursor in zip(kv, cursors, strict=True)]
        mx.eval(tails)
        states = [list(store.cache) for store in self.recurrent()]
        planes = {window: plane.copy() for window, plane in self.planes.items()}
        return GroupSnapshot(tails, states, planes, self.lengths.copy())

    def roll_back(self, old: GroupSnapshot) -> None:
        """Be as at the snapshot. Slots must not have changed and nothing repacked since."""
        self.planes, self.lengths = old.planes, old.lengths
        kv = [store for store in self.stores if isinstance(store, KVRows)]
        for store, tail in zip(kv, old.tails, strict=True):
            store.put(tail, self.planes[store.shape.window].cursor - tail[0].shape[2])
        for recurrent, states in zip(self.recurrent(), old.states, strict=True):
            recurrent.adopt(states)

    def begin(self, tokens: int) -> GroupView:
        """Make room for `tokens` tokens a row and set the view that layers read during the forward."""
        moves = {window: self._room_for(plane, 0, tokens) for window, plane in self.planes.items()}
        if any(moves.values()):
            made = [self._move_only(store, moves) for store in self.stores]
            self._adopt(made, moves)
        view = GroupView(self.planes, self.lengths.copy(), self.live.copy(), tokens)
        for store in self.stores:
            if isinstance(store, KVRows):
                store.view = view
        return view

    def end(self, tokens: int, lengths: np.ndarray | None = None) -> None:
        """The forward was launched: lengths advance now, values are read later."""
        for plane in self.planes.values():
            plane.advance(tokens, self.live, self.lengths)
        self.lengths[self.live] += tokens

    def rewind(self, counts: dict[int, int]) -> None:
        """Take back the last n tokens of rows. Recurrent layers are the batch's business (snapshot and replay).

        Raises:
            ValueError: more than a window layer still holds.
        """
        self.check_rewind(counts)
        slots = {self.rows.index(row): count for row, count in counts.items() if count}
        for plane in self.planes.values():
            plane.rewind(slots, self.lengths, self.live)
        for slot, count in slots.items():
            self.lengths[slot] -= count

    def check_rewind(self, counts: dict[int, int]) -> None:
        """Raise what `rewind` would, and change nothing."""
        for row, count in counts.items():
            slot = self.rows.index(row)
            length = int(self.lengths[slot])
            if not 0 <= count <= length:
                raise ValueError(f"cannot take back {count} of {length} tokens")
            for plane in self.planes.values():
                spare = plane.spare(slot, length - count)
                if count > spare:
                    raise ValueError(f"a window layer has {spare} tokens of row {row} to take back, not {count}")

    # --- geometry -----------------------------------------------------------------------------------------------

    def _free_slot(self) -> int:
        if None not in self.rows:
            old = len(self.rows)
            self._fit()
            self.select([*range(old), *[None] * (slots_for(old + 1) - old)])
        return self.rows.index(None)

    def _fit(self) -> None:
        """Have the places that these rows need, before there are more slots with as many.

        Not those that only rows which have left needed; and not so few that all slots are copied again soon.
        """
        if not self.count:
            return
        moves: dict[int | None, Move | None] = {}
        for window, plane in self.planes.items():
            move = plane.repack(1, 0, self.lengths)
            moves[window] = move if move.capacity != plane.capacity else None
        if any(moves.values()):
            self._adopt([self._move_only(store, moves) for store in self.stores], moves)

    def shrink_if_sparse(self) -> bool:
        """Compact the slots when a smaller batch has been enough for a while. True when slots moved."""
        wanted = slots_for(max(1, self.count))
        self._sparse_steps = self._sparse_steps + 1 if wanted < len(self.rows) else 0
        if self._sparse_steps < IDLE_STEPS_BEFORE_SHRINK:
            return False
        kept: list[int | None] = [slot for slot, row in enumerate(self.rows) if row is not None]
        self.select(kept + [None] * (wanted - len(kept)))
        self._sparse_steps = 0
        return True

    def select(self, slots: list[int | None]) -> None:
        """Become a group of these old slots, in this order; None is a fresh slot."""
        made = [store.selected(slots) for store in self.stores]
        for store, arrays in zip(self.stores, made, strict=True):
            store.adopt(arrays)  # type: ignore[arg-type]  # each store takes what it made
        for plane in self.planes.values():
            plane.select(slots)
        self.rows = [None if slot is None else self.rows[slot] for slot in slots]
        self.lengths = np.array([0 if slot is None else self.lengths[slot] for slot in slots], np.int64)
        self.live = np.array([row is not None for row in self.rows])

    def _room_for(self, plane: Plane, entries: int, tokens: int = 1) -> Move | None:
        if plane.has_room(tokens) and entries <= plane.cursor:
            return None
        return plane.repack(tokens, entries, self.lengths)

    def _close_holes(self) -> None:
        moves: dict[int | None, Move | None] = {
            window: plane.repack(1, 0, self.lengths) if plane.positions is not None else None
            for window, plane in self.planes.items()
        }
        if any(moves.values()):
            self._adopt([self._move_only(store, moves) for store in self.stores], moves)

    def _move_only(self, store: Store, moves: dict[int | None, Move | None]) -> Any:
        if not isinstance(store, KVRows):
            return None
        move = moves[store.shape.window]
        return None if move is None else store.moved(move)

    def _adopt(self, made: Sequence[Any], moves: dict[int | None, Move | None]) -> None:
        for store, arrays in zip(self.stores, made, strict=True):
            if arrays is not None:
                store.adopt(arrays)
        for window, move in moves.items():
            if move is not None:
                self.planes[window].apply(move)

    def arrays(self) -> list[mx.array]:
        """Everything the group holds."""
        return [array for store in self.stores for array in store.arrays()]

    def recurrent(self) -> list[ArraysRows]:
        """The recurrent layers."""
        return [store for store in self.stores if isinstance(store, ArraysRows)]

    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(array.nbytes for array in self.arrays())

    def check_integrity(self) -> None:
        """Raise AssertionError when host facts contradict each other."""
        assert len(self.rows) == len(self.lengths) == len(self.live)
        for slot, row in enumerate(self.rows):
            assert (row is not None) == bool(self.live[slot]), "live flag"
            assert row is not None or self.lengths[slot] == 0, "free slot with tokens"
        for plane in self.planes.values():
            assert 0 <= plane.cursor <= plane.capacity, "cursor outside the buffer"
            assert (plane.span <= plane.cursor).all(), "span before the buffer"
            assert (plane.span[~self.live] == 0).all(), "free slot with entries"
            for slot, length in enumerate(self.lengths):
                plane.check_slot(slot, int(length))
            for store in self.stores:
                if isinstance(store, KVRows) and store.shape.window == plane.window:
                    assert store.keys.shape[2] == store.values.shape[2] == plane.capacity, "buffer size"
        for store in self.stores:
            assert all(array.shape[0] == len(self.rows) for array in store.arrays()), "slots of a buffer"


def _sees_everything(store: Store) -> bool:
    return isinstance(store, KVRows) and store.shape.window is None
