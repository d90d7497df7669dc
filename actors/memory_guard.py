"""Decode's memory guard: how many rows must go back before those that stay outgrow the line. Owned by decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .memory_ledger import GUARD_STEPS, GUARD_TOKENS, MemoryLedger
from .returns import in_order_of_age

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .decode_rows import RunningRow


RECLAIM_STEPS = 3
"""After so many steps pages have been freed."""


class MemoryGuard:
    """Looks every GUARD_STEPS steps, GUARD_TOKENS tokens ahead.

    Before it puts any back it has the prefix cache give up what is lacking, and looks again soon.
    After rows were put back it waits until their buffers have shrunk, lest it puts back more than needed.

    Args:
        ledger: prices buffers.
        line_bytes: what must not be passed.

    Attributes:
        reclaim_bytes: what the prefix cache should give up; for the caller to pass on and set to 0.
    """

    def __init__(self, ledger: MemoryLedger, line_bytes: int) -> None:
        self.line_bytes = line_bytes
        self.reclaim_bytes = 0
        self._reclaims = ledger.pages_most_bytes > 0
        self._asked = False
        self._ledger = ledger
        self._steps = 0
        self._rows = 0

    def surplus_rows(self, active_bytes: int, rows: list[RunningRow]) -> int:
        """How many of the youngest rows have to go now; never all.

        Args:
            active_bytes: device memory in use; 0 when unknown.
            rows: those that decode.
        """
        self._steps += 1
        joined, self._rows = len(rows) > self._rows, len(rows)
        if not active_bytes or not (joined or self._steps >= GUARD_STEPS):
            return 0
        self._steps = 0
        lengths = [row.request.computed for row in in_order_of_age(rows)]
        excess = self._ledger.excess_bytes(active_bytes, lengths, self.line_bytes)
        if excess > 0 and self._reclaims and not self._asked:
            self._asked = True
            self.reclaim_bytes = excess
            self._steps = GUARD_STEPS - RECLAIM_STEPS
            return 0
        self._asked = False
        count = self._surplus(active_bytes, lengths)
        if count:
            self._steps = -GUARD_TOKENS // 2
        return count

    def turns_away(self, active_bytes: int, rows: Iterable[RunningRow], joining: Iterable[RunningRow]) -> bool:
        """Whether there is too little memory for rows to join those that decode.

        Admission has planned the join, but rows that decode may have outgrown the plan since. When none decodes there
        is room, since then nothing but what was planned is there.
        """
        lengths = [row.request.computed for row in rows]
        if not active_bytes or not lengths:
            return False
        wanted = [row.request.prefill_target for row in joining]
        return self._ledger.join_excess_bytes(active_bytes, lengths, wanted, self.line_bytes) > 0

    def _surplus(self, active_bytes: int, lengths: list[int]) -> int:
        for count in range(len(lengths)):
            kept = lengths[: len(lengths) - count]
            freed = self._ledger.freed_bytes(lengths, kept)
            if self._ledger.excess_bytes(active_bytes - freed, kept, self.line_bytes) <= 0 or len(kept) == 1:
                return count
        return 0
