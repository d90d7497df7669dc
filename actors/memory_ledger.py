"""What admitted rows will need, by the model's own layout: admission's and decode's memory arithmetic.

Admission plans every row at the length it will soon have, in the buffers it will share, and keeps room for the dearest
moment: a join (old buffers, new ones, and the row's own KV) or a smallest chunk behind the longest prompt, taken
SAFETY times as dear as the formula says, since formulas of transients are guesses. What the prefix cache may take
counts as used, so that pages never compete with rows; admission lowers its budget before it holds anybody. Rows grow
beyond the plan; then decode has pages freed, and puts the youngest back if that is not enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..runtime.kv_estimate import (
    KVLayout,
    alone_bytes,
    batch_bytes,
    group_bytes,
    grown_bytes,
    joined_bytes,
    longest_alone,
    staged_bytes,
    transient_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..runtime.request import Request

SAFETY = 2.0
GROWTH_TOKENS = 256
MEMORY_FLOOR_TOKENS = 32
GUARD_STEPS = 16
GUARD_TOKENS = 64
"""Decode looks so far ahead: to its next look, and past the steps after which a freed slot's memory is given back."""
JOIN_TOKENS = 4
"""Steps that may lie between a look at memory and a join."""
PAGES_SHARE = 0.25


def no_others() -> int:
    """What other engines claim where there are none."""
    return 0


class MemoryNeed(msgspec.Struct, frozen=True):
    """Bytes: what rows will hold, and what the dearest moment adds."""

    rows_bytes: int
    moment_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both."""
        return self.rows_bytes + self.moment_bytes


class MemoryLedger:
    """Plain arithmetic over one model's layout; each actor has its own.

    Args:
        layout: the model's.
        base_bytes: weights and all else that is there when nobody is.
        pages_bytes: budget of the prefix cache.
        line_bytes: what admitted work may be planned to use, `base_bytes` included.
        chunk_tokens: largest chunk.
        others: what other engines of the process claim.

    Attributes:
        pages_most_bytes: the prefix cache's whole budget.
        pages_bytes: what it may take now, or has in use above that.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        base_bytes: int,
        pages_bytes: int,
        line_bytes: int,
        chunk_tokens: int,
        others: Callable[[], int] = no_others,
    ) -> None:
        self.layout = layout
        self.base_bytes = base_bytes
        self.pages_bytes = self.pages_most_bytes = pages_bytes
        self.line_bytes = line_bytes
        self._chunk_tokens = chunk_tokens
        self._others = others

    def need(self, lengths: Sequence[int]) -> MemoryNeed:
        """What rows of these lengths will need."""
        layout = self.layout
        longest = max(lengths, default=0)
        rows = self.base_bytes + self.pages_bytes + batch_bytes(layout, lengths)
        join = staged_bytes(layout, longest, self._chunk_tokens) + group_bytes(layout, lengths)
        chunk = SAFETY * transient_bytes(layout, MEMORY_FLOOR_TOKENS, longest)
        return MemoryNeed(rows, int(max(join, chunk)))

    def shortage_bytes(self, lengths: Sequence[int]) -> int:
        """What these rows lack to be at work together; at most 0 when they may be."""
        return self.need(lengths).total_bytes - (self.line_bytes - self._others())

    def chunk_room_bytes(self, lengths: Sequence[int]) -> int:
        """What is left for the transient of a chunk beside these rows."""
        return self.line_bytes - self._others() - self.need(lengths).rows_bytes

    def row_limit(self, most: int, line_bytes: int) -> int:
        """The longest row, up to `most` tokens, that can be served alone below `line_bytes`, no prefix cached."""
        return longest_alone(self.layout, line_bytes - self.base_bytes, MEMORY_FLOOR_TOKENS, SAFETY, most)

    def alone_bytes(self, length: int) -> int:
        """What a row of `length` tokens needs at least, with all that is there anyway."""
        return self.base_bytes + int(alone_bytes(self.layout, length, MEMORY_FLOOR_TOKENS, SAFETY))

    def excess_bytes(self, active_bytes: int, lengths: Sequence[int], line_bytes: int) -> int:
        """By how much the next steps of these rows would pass `line_bytes`; at most 0 when they would not."""
        return active_bytes + grown_bytes(self.layout, lengths, GUARD_TOKENS) - line_bytes

    def join_excess_bytes(
        self, active_bytes: int, lengths: Sequence[int], joining: Sequence[int], line_bytes: int
    ) -> int:
        """By how much it would pass `line_bytes` if these rows joined those; at most 0 when it would not."""
        soon = [length + JOIN_TOKENS for length in lengths]
        return active_bytes + joined_bytes(self.layout, soon, joining) - line_bytes

    def freed_bytes(self, lengths: Sequence[int], kept: Sequence[int]) -> int:
        """What buffers give back when only `kept` stays."""
        return batch_bytes(self.layout, lengths) - batch_bytes(self.layout, kept)


def planned_length(request: Request) -> int:
    """Tokens that a row is planned with: some growth, or all of it once it had to be put back for memory.

    One that has outgrown that is planned with what it has and will have at decode's next look.
    """
    whole = len(request.prompt) + request.max_tokens
    if request.returns:
        return whole
    return min(whole, max(len(request.prompt) + GROWTH_TOKENS, request.computed + GUARD_TOKENS))


def planned_lengths(rows: Iterable[Request]) -> list[int]:
    """Of each row."""
    return [planned_length(row) for row in rows]


def pages_budget_bytes(wanted_bytes: int, line_bytes: int, base_bytes: int) -> int:
    """The prefix cache's budget: what was asked for, and at most a share of what the model leaves."""
    return min(wanted_bytes, max(0, int((line_bytes - base_bytes) * PAGES_SHARE)))
