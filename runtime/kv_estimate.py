"""What rows take on the device, in bytes: pure functions over plain facts of a model.

The layout is that of `engine/kv` (its constants are repeated here and a test compares the results with real buffers):
rows of a length class share buffers of `slots x capacity`, so a row is priced by what the buffers grow, not by its
length. Sliding layers stop growing at their window, recurrent state is one constant a row.

A forward over n prompt tokens behind d others needs, besides what it leaves behind, about n * (a + b * (d + n)) bytes:
a for activations, b for attention scores, where the device keeps them at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

GRAIN_TOKENS = 256
WINDOW_GRAIN_TOKENS = 64
REWIND_MARGIN_TOKENS = 32
SLOT_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)


class KVKind(msgspec.Struct, frozen=True):
    """Attention layers of one kind together.

    Attributes:
        window: tokens a query sees; None is all.
        token_bytes: bytes of one token in all of these layers.
    """

    window: int | None
    token_bytes: int


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's rows lie on the device.

    Attributes:
        kinds: its attention layers.
        state_bytes: recurrent state of one row.
        classes: upper bounds of the length classes, in tokens; () is one class for all.
        shared: whether rows share buffers; else each has its own.
        activation_bytes: a, bytes a prompt token needs while it is computed.
        score_bytes: b, bytes for each pair of a prompt token and one it looks at.
    """

    kinds: tuple[KVKind, ...] = ()
    state_bytes: int = 0
    classes: tuple[int, ...] = ()
    shared: bool = True
    activation_bytes: float = 0.0
    score_bytes: float = 0.0

    @property
    def token_bytes(self) -> int:
        """Bytes of one more token while no window is full."""
        return sum(kind.token_bytes for kind in self.kinds)


def round_up(value: int, grain: int) -> int:
    """The least multiple of `grain` that is at least `value`."""
    return -(-value // grain) * grain


def slots_for(rows: int) -> int:
    """Slots of buffers that hold so many rows."""
    return next((bucket for bucket in SLOT_BUCKETS if bucket >= rows), round_up(rows, 64))


def class_of(layout: KVLayout, length: int) -> int:
    """Upper bound of the class that a row of `length` tokens joins: with headroom, so that it does not move at once."""
    for bound in sorted(layout.classes):
        if length + min(256, bound // 4) <= bound:
            return bound
    return max(layout.classes, default=0)


def room_for(length: int) -> int:
    """Places of a plain buffer made for a row of `length` tokens and those that it decodes at first."""
    return round_up(length + 1 + GRAIN_TOKENS // 2, GRAIN_TOKENS)


def capacity(kind: KVKind, length: int) -> int:
    """Places of a buffer made for a longest row of `length` tokens."""
    if kind.window is None:
        return room_for(length)
    keep = kind.window - 1 + REWIND_MARGIN_TOKENS
    slack = min(max(keep, 64), GRAIN_TOKENS)
    return round_up(keep + 1 + slack, WINDOW_GRAIN_TOKENS)


def group_bytes(layout: KVLayout, lengths: Sequence[int]) -> int:
    """Buffers of rows that share one class."""
    if not lengths:
        return 0
    longest = max(lengths)
    row_bytes = sum(kind.token_bytes * capacity(kind, longest) for kind in layout.kinds) + layout.state_bytes
    return slots_for(len(lengths)) * row_bytes


def _least_bytes(layout: KVLayout, lengths: Sequence[int]) -> int:
    """The smallest buffers in which rows of one class can be."""
    if not lengths:
        return 0
    longest = max(lengths)
    row_bytes = layout.state_bytes
    for kind in layout.kinds:
        places = round_up(longest + 1, GRAIN_TOKENS) if kind.window is None else capacity(kind, longest)
        row_bytes += kind.token_bytes * places
    return slots_for(len(lengths)) * row_bytes


def batch_bytes(layout: KVLayout, lengths: Iterable[int]) -> int:
    """Buffers of all rows."""
    return sum(group_bytes(layout, group) for group in _groups(layout, lengths).values())


def staged_bytes(layout: KVLayout, length: int, chunk_tokens: int = 0) -> int:
    """Most that one row's KV takes while its prompt is computed in chunks of at most `chunk_tokens`.

    mlx-lm's plain cache grows by whole grains behind the tokens it has, wherever they end; from its second chunk on it
    has room for the whole prompt.
    """
    total = layout.state_bytes
    for kind in layout.kinds:
        kept = max(length + GRAIN_TOKENS - 1, room_for(length))
        total += kind.token_bytes * (kept if kind.window is None else min(kept, kind.window + chunk_tokens))
    return total


def widened_bytes(layout: KVLayout, held: int, room: int) -> int:
    """What a row's own caches take more when their `held` places become `room`."""
    more = 0
    for kind in layout.kinds:
        most = room if kind.window is None else min(room, kind.window)
        more += kind.token_bytes * max(0, most - held)
    return more


def grown_bytes(layout: KVLayout, lengths: Sequence[int], tokens: int) -> int:
    """What `tokens` more of every row need: the larger buffers, while those they are copied from still exist.

    A buffer grows when it is full, not when one made anew would be larger: those there are may be the smallest that
    hold these rows.
    """
    before = _groups(layout, lengths)
    after = _groups(layout, [length + tokens for length in lengths])
    needed = 0
    for bound in before.keys() | after.keys():
        old, new = _least_bytes(layout, before.get(bound, [])), group_bytes(layout, after.get(bound, []))
        needed += new if new > old else 0
    return needed


def transient_bytes(layout: KVLayout, tokens: int, depth: int) -> float:
    """What a chunk of `tokens` behind `depth` others needs while it runs, its pages put aside included."""
    a, b = layout.activation_bytes + layout.token_bytes, layout.score_bytes
    return tokens * (a + b * (depth + tokens))


def chunk_within(layout: KVLayout, free_bytes: float, depth: int) -> int:
    """Most tokens of a chunk behind `depth` others that needs at most `free_bytes`, its own KV included."""
    if free_bytes <= 0:
        return 0
    linear = layout.activation_bytes + 2 * layout.token_bytes + layout.score_bytes * depth
    square = layout.score_bytes
    if linear <= 0 and square <= 0:
        return 1 << 30
    # The stable form of the root of square * n^2 + linear * n = free.
    return int(2 * free_bytes / (linear + (linear * linear + 4 * square * free_bytes) ** 0.5))


def joined_bytes(layout: KVLayout, lengths: Sequence[int], joining: Sequence[int]) -> int:
    """What it needs for rows to join others: larger buffers, and room to copy these once more as they grow or shrink.

    Admission plans with the same (see `MemoryLedger.need`).
    """
    before, after = _groups(layout, lengths), _groups(layout, [*lengths, *joining])
    needed = 0
    for bound, group in after.items():
        old, new = _least_bytes(layout, before.get(bound, [])), group_bytes(layout, group)
        needed += 2 * new - old if new > old else 0
    return needed


def alone_bytes(layout: KVLayout, length: int, floor_tokens: int, safety: float) -> float:
    """Most that one row of `length` tokens needs at any time when nobody else is there, in smallest chunks."""
    row = batch_bytes(layout, [length])
    prefill = staged_bytes(layout, length, floor_tokens) + safety * transient_bytes(layout, floor_tokens, length)
    join = row + staged_bytes(layout, length, floor_tokens)
    return max(prefill, join, 2 * row)


def longest_alone(layout: KVLayout, free_bytes: int, floor_tokens: int, safety: float, most: int) -> int:
    """The longest row, up to `most` tokens, that fits alone; 0 when none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if alone_bytes(layout, middle, floor_tokens, safety) <= free_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _groups(layout: KVLayout, lengths: Iterable[int]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        key = class_of(layout, length) if layout.shared else -1 - place
        groups.setdefault(key, []).append(length)
    return groups
