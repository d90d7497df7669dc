"""Where KV lies in a buffer shared by many rows: host arithmetic only.

All rows of a plane write at one cursor. A row's entries end at the cursor; the oldest lies `span` places before it.
Keys carry their rotary position already, so only the order matters to attention, and a window is a distance in places.
Rejected tokens leave *holes*; only then does the plane keep a map `positions[slot, place]` (-1 is a hole), which goes
away at the next repack. Row counts and tokens are host integers: lazy counters that nobody evaluates would leak.

Owned by the MLX thread.
"""

from __future__ import annotations

import numpy as np

REWIND_MARGIN = 32
"""Entries a window plane keeps beyond its window, so that so many tokens can be taken back."""

GRAIN = 256
"""Capacities are multiples of this (MLX's CUDA decode kernel wants it, and buffers are reused)."""


def round_up(value: int, grain: int = GRAIN) -> int:
    """The least multiple of `grain` that is at least `value`."""
    return -(-value // grain) * grain


def room_for(tokens: int) -> int:
    """Capacity of a buffer for a row of `tokens` tokens and those that it decodes at first."""
    return round_up(tokens + 1 + GRAIN // 2)


class Move:
    """How a repack moves entries: places [source, source + count) go to [target, ...) of a buffer of `capacity`.

    With `gather` (slots, count), each slot takes its own places instead, in that order; its last `spans[slot]` count.
    """

    __slots__ = ("capacity", "count", "gather", "source", "spans", "target")

    def __init__(self, capacity: int, source: int, count: int, target: int) -> None:
        self.capacity = capacity
        self.source = source
        self.count = count
        self.target = target
        self.gather: np.ndarray | None = None
        self.spans: np.ndarray | None = None


class Plane:
    """One cursor over `capacity` places for `slots` rows.

    Args:
        slots: rows that fit, live or not.
        window: most recent tokens a query sees, itself included; None is all.
    """

    def __init__(self, slots: int, window: int | None) -> None:
        self.window = window
        self.capacity = 0
        self.cursor = 0
        self.span = np.zeros(slots, np.int64)
        self.positions: np.ndarray | None = None

    @property
    def keep(self) -> int | None:
        """Most entries a row needs to keep; None is all of them."""
        return None if self.window is None else self.window - 1 + REWIND_MARGIN

    def entries(self, length: int) -> int:
        """How many of a row's `length` tokens are kept here."""
        return length if self.keep is None else min(length, self.keep)

    def has_room(self, tokens: int) -> bool:
        """Whether `tokens` more can be written."""
        return self.cursor + tokens <= self.capacity

    def repack(self, tokens: int, longest: int, lengths: np.ndarray) -> Move:
        """Plan a buffer in which a row of `longest` entries fits before the cursor and `tokens` after it.

        Nothing changes until `apply`.
        """
        if self.positions is None:
            count = int(self.span.max(initial=0))
            return self._move(count, max(count, longest), tokens)
        gather, spans = self._gather(lengths)
        count = gather.shape[1]
        move = self._move(count, max(count, longest), tokens)
        move.gather, move.spans = gather, spans
        return move

    def _move(self, count: int, cursor: int, tokens: int) -> Move:
        return Move(self._capacity_for(cursor, tokens), self.cursor - count, count, cursor - count)

    def apply(self, move: Move) -> None:
        """Take on the geometry of a move whose arrays have been made."""
        if move.spans is not None:
            self.positions = None
            self.span = move.spans
        self.capacity = move.capacity
        self.cursor = move.target + move.count

    def _capacity_for(self, target: int, tokens: int) -> int:
        if self.keep is None:
            return room_for(target + tokens - 1)
        slack = min(max(self.keep, 64), GRAIN)
        return round_up(max(target, self.keep) + tokens + slack, 64)

    def _gather(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert self.positions is not None
        none = np.zeros(0, np.int64)
        kept: list[np.ndarray] = [
            np.flatnonzero(self.positions[slot, : self.cursor] >= 0)[-self.entries(int(length)) :] if length else none
            for slot, length in enumerate(lengths)
        ]
        spans = np.array([len(places) for places in kept], np.int64)
        gather = np.zeros((len(kept), int(spans.max(initial=0))), np.int64)
        for slot, places in enumerate(kept):
            if len(places):
                gather[slot, -len(places) :] = places
        return gather, spans

    def held(self, slot: int) -> int:
        """Tokens of a slot's row whose entries are here, the newest ones."""
        if self.positions is None:
            return int(self.span[slot])
        return int((self.positions[slot, : self.cursor] >= 0).sum())

    def spare(self, slot: int, length: int) -> int:
        """How many tokens may be taken back so that a row of then `length` tokens still has all it sees."""
        needed = length if self.window is None else min(length, self.window - 1)
        return self.held(slot) - needed

    def copy(self) -> Plane:
        """A twin that shares nothing."""
        twin = Plane(0, self.window)
        twin.capacity, twin.cursor, twin.span = self.capacity, self.cursor, self.span.copy()
        twin.positions = None if self.positions is None else self.positions.copy()
        return twin

    def check_slot(self, slot: int, length: int) -> None:
        """Raise AssertionError when a slot does not hold what a row of `length` tokens sees."""
        assert self.spare(slot, length) >= 0, "entries are missing"
        if self.positions is None:
            assert self.span[slot] <= self.entries(length), "span beyond the length"
            return
        places = np.flatnonzero(self.positions[slot] >= 0)
        assert not len(places) or self.cursor - self.span[slot] <= places[0], "an entry outside the span"
        assert not len(places) or places[-1] < self.cursor, "an entry behind the cursor"
        found = self.positions[slot, places]
        assert (found == np.arange(length - len(places), length)).all(), "positions out of order"

    def advance(self, tokens: int, live: np.ndarray, lengths: np.ndarray) -> None:
        """`tokens` were written at the cursor for every slot; they count for live ones. Lengths are those before."""
        if self.positions is not None:
            for offset in range(tokens):
                self.positions[:, self.cursor + offset] = np.where(live, lengths + offset, -1)
        self.cursor += tokens
        self.span += tokens * live
        if self.keep is not None and self.positions is None:
            np.minimum(self.span, self.keep, out=self.span)

    def place(self, slot: int, length: int, count: int) -> None:
        """The last `count` entries of a row of `length` tokens were written so that they end at the cursor."""
        self.span[slot] = count
        if self.positions is not None:
            self.positions[slot] = -1
            self.positions[slot, self.cursor - count : self.cursor] = np.arange(length - count, length)

    def clear(self, slot: int) -> None:
        """The slot is free."""
        self.span[slot] = 0
        if self.positions is not None:
            self.positions[slot] = -1

    def rewind(self, slots: dict[int, int], lengths: np.ndarray, live: np.ndarray) -> None:
        """Take back the last n tokens of each slot in `slots`. Lengths are those before.

        The cursor goes back over places that no row has an entry in; what is left over becomes holes.
        """
        counts = {slots.get(int(slot), 0) for slot in np.flatnonzero(live)}
        if self.positions is None and len(counts) == 1:
            self._step_back(counts.pop(), live)
        elif any(counts):
            self._make_holes(slots, lengths)
            self._step_back(self._unused(max(counts)), live)

    def _step_back(self, places: int, live: np.ndarray) -> None:
        self.cursor -= places
        self.span[live] = np.maximum(self.span[live] - places, 0)

    def _make_holes(self, slots: dict[int, int], lengths: np.ndarray) -> None:
        if self.positions is None:
            self._open_positions(lengths)
        assert self.positions is not None
        for slot, count in slots.items():
            row = self.positions[slot]
            row[row >= int(lengths[slot]) - count] = -1

    def _unused(self, most: int) -> int:
        """How many of the last `most` places are holes in every row: after an earlier rewind a row's newest entries
        may lie further back than the cursor."""
        assert self.positions is not None
        newest = self.positions[:, max(0, self.cursor - most) : self.cursor]
        used = np.flatnonzero((newest >= 0).any(axis=0))
        return newest.shape[1] - (int(used[-1]) + 1 if len(used) else 0)

    def _open_positions(self, lengths: np.ndarray) -> None:
        self.positions = np.full((len(self.span), self.capacity), -1, np.int32)
        for slot, span in enumerate(self.span):
            length = int(lengths[slot])
            self.positions[slot, self.cursor - span : self.cursor] = np.arange(length - span, length)

    def select(self, slots: list[int | None]) -> None:
        """Become a plane of these old slots in this order; None is a new, free one."""
        self.span = np.array([0 if s is None else self.span[s] for s in slots], np.int64)
        if self.positions is not None:
            empty = np.full(self.capacity, -1, np.int32)
            self.positions = np.stack([empty if s is None else self.positions[s] for s in slots])
