"""What rows of a group see, whatever happened to it: keys are numbers that name their row and position.

Joins, leaves, blocks of tokens, rewinds with holes, repacks, slot growth, compaction and moves to another group, in any
order; after each forward every query must see its own row's tokens up to itself, within its window, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_troupe.runtime.engine.kv.group import IDLE_STEPS_BEFORE_SHRINK, RowGroup
from mlx_troupe.runtime.engine.kv.shapes import KVShape

if TYPE_CHECKING:
    from mlx_troupe.runtime.engine.kv.stores import KVRows

WINDOW = 8
BASE = 10_000
"""Key of position p of row r is r * BASE + p + 1, exact in float32."""


def shape(window: int | None) -> KVShape:
    return KVShape(window, 1, 1, mx.float32, 1, 1, mx.float32)


def keys_of(row: int, low: int, high: int) -> mx.array:
    return mx.arange(row * BASE + low + 1, row * BASE + high + 1).astype(mx.float32)[None, None, :, None]


def visible(store: KVRows, keys: mx.array, tokens: int, *, as_array: bool, window: int | None) -> list[list[list[int]]]:
    """Keys that each query of each slot sees, under the mask the model would be given."""
    found = np.array(keys)[:, 0, :, 0].astype(int)
    mask = store.make_mask(tokens, return_array=as_array, window_size=window)
    count = found.shape[1]
    if mask is None or isinstance(mask, str):
        assert mask == (None if tokens == 1 else "causal")
        assert not as_array
        seen = np.tril(np.ones((tokens, count), bool), count - tokens)[None].repeat(len(found), 0)
    else:
        seen = np.array(mask)[:, 0]
    return [[list(keys[allowed]) for allowed in rows] for keys, rows in zip(found, seen, strict=True)]


class GroupMachine(RuleBasedStateMachine):
    """A group with a full and a window layer, and a second one that rows may move to."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = [RowGroup([shape(None), shape(WINDOW)]) for _ in range(2)]
        self.lengths: dict[int, int] = {}
        self.next_row = 0

    def group_of(self, row: int) -> RowGroup:
        return next(group for group in self.groups if row in group.rows)

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.lengths)))

    @rule(length=st.one_of(st.just(0), st.integers(1, 70)), spare=st.integers(0, 40), where=st.integers(0, 1))
    def join(self, length: int, spare: int, where: int) -> None:
        """The staged window layer holds at least its window less one, at most all that the plane keeps."""
        row, self.next_row = self.next_row, self.next_row + 1
        group = self.groups[where]
        held = [length, min(group.planes[WINDOW].entries(length), WINDOW - 1 + spare)]
        state = [(keys_of(row, length - n, length), -keys_of(row, length - n, length)) for n in held]
        group.join(row, length, state)
        self.lengths[row] = length

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        row = self.pick(data)
        self.group_of(row).leave(row)
        del self.lengths[row]

    @rule(tokens=st.integers(1, 5), times=st.integers(1, 40), as_array=st.booleans(), narrow=st.sampled_from([None, 5]))
    def forward(self, tokens: int, times: int, as_array: bool, narrow: int | None) -> None:
        for group in self.groups:
            for _ in range(times if tokens == 1 else 1):
                self.run(group, tokens, as_array, narrow)

    def run(self, group: RowGroup, tokens: int, as_array: bool, narrow: int | None) -> None:
        group.begin(tokens)
        new = mx.concatenate(
            [
                keys_of(BASE if row is None else row, int(n), int(n) + tokens)
                for row, n in zip(group.rows, group.lengths, strict=True)
            ]
        )
        for store in group.stores:
            keys, values = store.update_and_fetch(new, -new)
            assert bool((keys == -values).all())
            window = narrow or store.shape.window
            self.check(group, visible(store, keys, tokens, as_array=as_array, window=narrow), tokens, window)
        group.end(tokens)
        for row in group.rows:
            if row is not None:
                self.lengths[row] += tokens

    def check(self, group: RowGroup, seen: list[list[list[int]]], tokens: int, window: int | None) -> None:
        for row, queries in zip(group.rows, seen, strict=True):
            for place, found in enumerate(queries):
                if row is None:
                    assert found, "a dead slot must see something, or its softmax is NaN"
                    continue
                end = self.lengths[row] + place + 1
                low = 0 if window is None else max(0, end - window)
                assert sorted(found) == [row * BASE + p + 1 for p in range(low, end)]

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        """Any subset of rows, any number of tokens that the group says it can take back."""
        for group in self.groups:
            counts = {
                row: data.draw(st.integers(0, min(4, self.spare(group, row)))) for row in group.rows if row is not None
            }
            group.rewind(counts)
            for row, count in counts.items():
                self.lengths[row] -= count

    def spare(self, group: RowGroup, row: int) -> int:
        slot, length = group.rows.index(row), self.lengths[row]
        fits = [n for n in range(length + 1) if all(n <= p.spare(slot, length - n) for p in group.planes.values())]
        return max(fits)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        row = self.pick(data)
        source = self.group_of(row)
        target = self.groups[1 - self.groups.index(source)]
        target.join(row, *source.extract(row))
        source.leave(row)

    @precondition(lambda self: any(self.lengths.values()))
    @rule(data=st.data())
    def export(self, data: st.DataObject) -> None:
        row = self.pick(data)
        length = self.lengths[row]
        low = data.draw(st.integers(0, length))
        keys, values = self.group_of(row).export(row, low, length)[0]
        assert bool((keys == keys_of(row, low, length)).all())
        assert bool((values == -keys).all())

    @rule()
    def compact(self) -> None:
        for group in self.groups:
            for _ in range(IDLE_STEPS_BEFORE_SHRINK):
                group.shrink_if_sparse()

    @invariant()
    def whole(self) -> None:
        for group in self.groups:
            group.check_integrity()
            for row, length in zip(group.rows, group.lengths, strict=True):
                assert length == (0 if row is None else self.lengths[row])


TestGroup = GroupMachine.TestCase
TestGroup.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
