"""Short pieces of several prompts computed in one forward: each after its own KV, on the left of a shared block.

A burst of short prompts is bound by the number of forwards, not by their tokens (32 prompts of 50 tokens on a small
model: 32 forwards took 70 ms, one takes 12). What pads a row comes after its tokens, which never see it, so its KV is
what it would be alone. Only for caches of KV; recurrent state would take in the padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..mlxlm import RotatingKVCache
from .group import RowGroup
from .pages import leaf_caches
from .shapes import KVShape, leaves
from .stores import KVRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .shapes import LayerShape
    from .staged import StagedRow

LONGEST_TOGETHER = 512
"""Longer pieces fill the device by themselves."""
MOST_TOKENS = 4096
"""Tokens, padding included, of one forward."""
MOST_PLACES = 8192
"""Places of all rows, what they hold already included: it is copied into the block."""
FREE_PADDING = 256
"""Padding that costs less than another forward."""


class Piece(NamedTuple):
    """The next tokens of a row, at least one."""

    row: StagedRow
    tokens: Sequence[int]


def can_share(shapes: list[LayerShape] | None) -> bool:
    """Whether the model's layers keep nothing but KV in shared buffers."""
    return shapes is not None and all(isinstance(shape, KVShape) for shape in leaves(shapes))


def packs(lengths: Sequence[int], depths: Sequence[int]) -> list[list[int]]:
    """Which pieces (by index) to compute together, each pack padded by at most a third of its tokens or so.

    Pieces that are left alone form packs of one.

    Args:
        lengths: tokens of each piece.
        depths: tokens each row has already.
    """
    out: list[list[int]] = []
    pack: list[int] = []
    tokens = longest = deepest = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], depths[i])):
        length, depth, count = lengths[index], max(deepest, depths[index]), len(pack) + 1
        padded = longest * count > min(MOST_TOKENS, (tokens + length) * 4 // 3 + FREE_PADDING)
        if pack and not padded and (longest + depth) * count <= MOST_PLACES:
            pack.append(index)
            tokens, deepest = tokens + length, depth
            continue
        pack, tokens, longest, deepest = [index], length, length, depths[index]
        out.append(pack)
    return out


def extend_together(
    model: Any,
    shapes: list[LayerShape],
    pieces: Sequence[Piece],
    read: Callable[[mx.array], list[mx.array]] | None = None,
) -> None:
    """Run the pieces through the model in one forward and evaluate their KV; blocks until the device is done.

    The rows share memory until the last of them is dropped. When it raises they are as they were.

    Args:
        model: mlx-lm's.
        shapes: of its layers; see `can_share`.
        pieces: of different rows.
        read: makes arrays of the forward's output (pieces, longest, size) that are evaluated with the KV.
    """
    longest = max(len(piece.tokens) for piece in pieces)
    group = _group_of([piece.row for piece in pieces], shapes, longest)
    group.begin(longest)
    block = [[*piece.tokens, *[0] * (longest - len(piece.tokens))] for piece in pieces]
    output = model(mx.array(block, dtype=mx.int32), cache=group.layers)
    mx.eval(group.arrays(), [] if read is None else read(output))
    for slot, piece in enumerate(pieces):
        _take_back(piece.row, group, slot, len(piece.tokens))


def _group_of(rows: Sequence[StagedRow], shapes: list[LayerShape], room: int) -> RowGroup:
    """A group with a slot for each row, its KV copied in, and `room` more places."""
    group = RowGroup(shapes, len(rows))
    group.live[:] = True
    group.lengths = np.array([row.length for row in rows], np.int64)
    states = [group.staged_state(row) for row in rows]
    for place, store in enumerate(group.stores):
        assert isinstance(store, KVRows)
        keys, values = zip(*(state[place] for state in states), strict=True)
        plane = group.planes[store.shape.window]
        plane.span = np.array([part.shape[2] for part in keys], np.int64)
        plane.cursor = int(plane.span.max())
        plane.capacity = plane.cursor + room
        store.adopt((_stacked(keys, plane.cursor, room), _stacked(values, plane.cursor, room)))
    return group


def _stacked(parts: Sequence[mx.array], cursor: int, room: int) -> mx.array:
    """Parts (1, heads, <= cursor, size) that end at `cursor`: (rows, heads, cursor + room, size)."""
    if cursor == 0:
        _, heads, _, size = parts[0].shape
        return mx.zeros((len(parts), heads, room, size), parts[0].dtype)
    padded = [mx.pad(part, [(0, 0), (0, 0), (cursor - part.shape[2], room), (0, 0)]) for part in parts]
    return mx.concatenate(padded, axis=0)


def _take_back(row: StagedRow, group: RowGroup, slot: int, tokens: int) -> None:
    """Make the slot's KV, `tokens` more than before, the row's own."""
    length = row.length + tokens
    for store, cache in zip(group.stores, leaf_caches(row.caches), strict=True):
        assert isinstance(store, KVRows)
        plane = group.planes[store.shape.window]
        end, kept = plane.cursor + tokens, int(plane.span[slot]) + tokens
        if isinstance(cache, RotatingKVCache):
            kept = min(kept, cache.max_size)
            cache._idx = kept
        cache.keys, cache.values = store.view_of(slot, end - kept, end)
        cache.offset = length
    row.length = length
