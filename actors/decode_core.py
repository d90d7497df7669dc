"""Decode's decisions: which rows and chunks make the next step, and what a step's tokens mean.

Three verbs: `plan()` builds the next StepPlan, the executor runs it, `commit(result)` takes its tokens. With overlap
two plans are in flight: the engine launches k+1 on the still unread tokens of k, then reads k.

Invariants (DESIGN section 3; each has a test of its number):
1. A row's `computed` advances when it is planned; tokens are added when the step is committed.
2. A row that stops at k is in flight once more at k+1, and that token is dropped. Nothing is planned past max_tokens.
3. Pages and rows named by a plan in flight stay: a row leaves once, by a later plan.
4. Cancels take effect at one point only: after k+1 was sent and before k is committed, or at once when no step is out.
5. A row joins without a barrier: its last known token enters the next plan as an ordinary decode row.
6. A row that is sent back keeps its tokens; what was in flight for it is dropped and sampled again later.
A chunk is the one barrier: nothing is sent behind it, so that rows whose prompt it completes join the very next step.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..runtime.errors import EngineFailed
from ..runtime.messages.admission import Requeue, RowDone
from ..runtime.messages.cache_store import Reclaim
from ..runtime.messages.executor import StepPlan
from ..runtime.messages.prefill import ChunksDone
from ..runtime.request import State
from .decode_chunks import ChunkDesk
from .decode_rows import Flight, RunningRow, join, leave
from .decode_tokens import accept
from .returns import survives, youngest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..runtime.clock import Clock
    from ..runtime.errors import TroupeError
    from ..runtime.messages.admission import AdmissionMessage
    from ..runtime.messages.cache_store import CacheStoreMessage
    from ..runtime.messages.decode import ChunksResult, Offer, RowsFailed, StepResult
    from ..runtime.messages.executor import JoinRow, LeaveRow
    from ..runtime.messages.prefill import ChunkDone, PrefillMessage
    from ..runtime.request import Request
    from .memory_guard import MemoryGuard

logger = logging.getLogger(__name__)

_NEVER_S = float("inf")


class DecodeCore:
    """Owned by the decode actor, who sends what is in the outboxes after each turn.

    Args:
        overlap: whether the engine commits a step only when it gets the next plan.
        page_tokens: tokens of a page; 0 stores nothing.
        clock: stamps tokens and judges deadlines.
        guard: says when rows would outgrow the memory; None never does.
    """

    def __init__(self, *, overlap: bool, page_tokens: int, clock: Clock, guard: MemoryGuard | None = None) -> None:
        self.to_prefill: list[PrefillMessage] = []
        self.to_admission: list[AdmissionMessage] = []
        self.to_cache: list[CacheStoreMessage] = []
        self.steps = 0
        self.completion_tokens = 0
        self.preempted = 0
        self._overlap = overlap
        self._depth = 2 if overlap else 1
        self._page_tokens = page_tokens
        self._clock = clock
        self._desk = ChunkDesk()
        self._guard = guard
        self._rows: dict[int, RunningRow] = {}
        self._joining: dict[int, list[RunningRow]] = {}
        self._active: dict[int, RunningRow] = {}
        self._leaving: dict[int, RunningRow] = {}
        self._flights: list[Flight] = []
        self._unread = False
        self._aborts: dict[int, bool] = {}
        self._deadline_s = _NEVER_S
        self._active_bytes = 0
        self._failure: TroupeError | None = None

    @property
    def running(self) -> int:
        """Rows handed over by prefill and not ended."""
        return len(self._rows)

    @property
    def decoding(self) -> int:
        """Rows that take part in the next step, joins included."""
        return len(self._active) + sum(map(len, self._joining.values()))

    @property
    def idle(self) -> bool:
        """True when nothing runs, waits or is in flight."""
        return not (self._rows or self._leaving or self._flights or self._unread or self._desk.busy)

    def ready(self, rows: tuple[Request, ...]) -> None:
        """Take over rows of one prompt; they join with the next plan."""
        group = [RunningRow(request) for request in rows]
        now_s = self._clock.now()
        for row in group:
            if not row.request.finished:  # its owner outside may have ended it, at a shutdown
                row.request.move(State.RUNNING)
            if row.request.running_s is None:
                row.request.running_s = now_s
            self._rows[row.request.row] = row
            if row.request.deadline_s is not None:
                self._deadline_s = min(self._deadline_s, row.request.deadline_s)
        self._joining[rows[0].leader] = group
        if self._failure is not None:
            self.fail_all(self._failure)

    def offer(self, offer: Offer) -> None:
        """Take prefill's answer."""
        if dropped := self._desk.offer(offer):
            self._report(dropped)

    def withdraw(self, leaders: Iterable[int]) -> None:
        """Rows whose prefill ended early."""
        if dropped := self._desk.withdraw(leaders):
            self._report(dropped)

    def cancel(self, rows: Iterable[int], *, timeout: bool = False) -> None:
        """End rows at the start of the next commit, or now when no step is out."""
        self._aborts.update((row, timeout) for row in rows if row in self._rows)
        if not any(flight.rows for flight in self._flights):
            self._apply_aborts()

    def plan(self) -> StepPlan | None:
        """The next plan, or None when there is nothing to send or no room in flight."""
        if not self._may_plan():
            return None
        leaves = self._take_leaves()
        if self._guard is not None and self._joining:
            self._guard_joins(self._guard)
        joins = self._take_joins()
        unmeasured = sum(flight.rows is not None for flight in self._flights) + 1
        offer = self._desk.take_due(decoding=bool(self._active), steps_ahead=unmeasured)
        chunks = () if offer is None else offer.chunks
        rows = self._launch()
        discards = self._desk.take_discards()
        if not (rows or leaves or chunks or discards or self._unread):
            return None  # joins are always rows as well
        self.steps += 1
        if rows or chunks:
            self._flights.append(Flight(self.steps, rows or None, chunks))
        self._unread = self._overlap and bool(rows) and not chunks
        numbers = tuple([row.request.row for row in rows])
        below_bytes = 0 if offer is None else offer.below_bytes
        return StepPlan(self.steps, numbers, joins, leaves, chunks, discards, below_bytes)

    def commit(self, result: StepResult) -> None:
        """Take the tokens of a step: cancels and deadlines first, then text and stops, row by row."""
        rows = self._landed(result)
        if not rows:
            return
        self._apply_aborts()
        now_s = self._clock.now()
        if now_s >= self._deadline_s:
            self._expire(now_s)
        self._desk.stepped(result.seconds)
        logprobs = result.logprobs
        finished = State.FINISHED
        for row, token in zip(rows, result.tokens, strict=True):
            request = row.request
            if self._rows.get(request.row) is not row:
                continue
            if request.state is finished:
                self._ended(row)  # by its owner outside, at a shutdown
                continue
            if token < 0:
                raise ValueError(f"step {result.step}: row {request.row} got the placeholder {token}")
            self.completion_tokens += 1
            try:
                ended = accept(request, token, logprobs.get(request.row) if logprobs else None, now_s)
            except Exception:
                logger.exception("row %d: its text failed", request.row)
                request.fail(EngineFailed("turning tokens into text failed"), now_s)
                ended = True
            if ended:
                self._ended(row)
        self._active_bytes = result.active_bytes
        if self._guard is not None:
            self._guard_memory(self._guard, result.active_bytes)

    def _guard_memory(self, guard: MemoryGuard, active_bytes: int) -> None:
        for _ in range(guard.surplus_rows(active_bytes, list(self._active.values()))):
            self.preempt(f"{active_bytes >> 20} MiB in use, and growing past {guard.line_bytes >> 20} MiB")
        if guard.reclaim_bytes:
            self.to_cache.append(Reclaim(guard.reclaim_bytes))
            guard.reclaim_bytes = 0

    def _guard_joins(self, guard: MemoryGuard) -> None:
        """Rows whose prompt is computed go back to the queue when there is no room beside those that decode."""
        for group in list(self._joining.values()):
            if not guard.turns_away(self._active_bytes, self._active.values(), group):
                continue
            for row in [row for row in group if row.request.may_return]:
                logger.warning("row %d goes back to the queue: too little memory to join", row.request.row)
                self.preempted += 1
                self._forget(row)
                self._send_back(row.request)

    def chunks_done(self, result: ChunksResult) -> None:
        """Chunks have run: prefill hears of it, and the next plan waits for its answer."""
        flight = next((flight for flight in self._flights if flight.step == result.step), None)
        if flight is None or flight.rows is not None or not flight.chunks:
            raise ValueError(f"chunks of step {result.step} are not expected now")
        self._flights.remove(flight)
        self._active_bytes = result.active_bytes
        self._report(self._desk.ran(flight.chunks, result.outcomes), result.active_bytes)

    def rows_failed(self, failure: RowsFailed) -> None:
        """The engine threw rows out of the batch: they go back to the queue or end, and need not leave."""
        gone = set(failure.rows)
        alone = len(gone) == 1
        now_s = self._clock.now()
        for number in gone:
            left = self._leaving.pop(number, None)
            if left is not None and left.returns:
                self._send_back(left.request)
            if (row := self._rows.get(number)) is None:
                continue
            if survives(row.request, failure.fault, failure.error, now_s, alone=alone, code=failure.code):
                self._forget(row)
                self._send_back(row.request)
            else:
                self._ended(row, leaves=False)
        for flight in list(self._flights):
            for row in flight.rows or ():
                if row.request.row in gone:
                    row.failed_step = min(row.failed_step, failure.step)
            if flight.rows and all(row.failed_step <= flight.step for row in flight.rows):
                self._land(flight)  # there may be no result any more

    def preempt(self, reason: str, *, last: bool = False) -> bool:
        """Send the youngest row back to the queue, its pages kept; False when none can go, or only the `last` could."""
        row = youngest(self._active.values()) if last or len(self._rows) > 1 else None
        if row is None:
            return False
        logger.warning("row %d is put back to the queue: %s", row.request.row, reason)
        self.preempted += 1
        row.returns = True
        self._forget(row)
        self._leaving[row.request.row] = row
        return True

    def fail_all(self, error: TroupeError) -> None:
        """End every row with an error, now and later: no step will come back."""
        self._failure = error
        for row in list(self._rows.values()):
            row.request.fail(error, self._clock.now())
            self._ended(row, leaves=False)
        for row in self._leaving.values():
            if row.returns:
                row.request.fail(error, self._clock.now())
                self.to_admission.append(RowDone(row.request.row))
        self._leaving.clear()
        self._flights.clear()
        self._unread = False

    def _may_plan(self) -> bool:
        if self._failure is not None or self._desk.waiting_for_prefill or len(self._flights) >= self._depth:
            return False
        return not any(flight.chunks for flight in self._flights)

    def _launch(self) -> list[RunningRow]:
        """Invariants 1 and 2: lengths advance now, and a row whose last token is now in flight leaves next."""
        rows = list(self._active.values())
        for row in rows:
            request = row.request
            request.computed += 1
            if request.computed == row.limit:
                self._leaving[request.row] = self._active.pop(request.row)
        return rows

    def _take_joins(self) -> tuple[JoinRow, ...]:
        if not self._joining:
            return ()
        joins: list[JoinRow] = []
        for leader, group in self._joining.items():
            for row in group:
                self._active[row.request.row] = row
                joins.append(join(row.request))
            self._desk.discard(leader)
        self._joining.clear()
        return tuple(joins)

    def _take_leaves(self) -> tuple[LeaveRow, ...]:
        if not self._leaving:
            return ()
        leaves: list[LeaveRow] = []
        for row in self._leaving.values():
            message, store = leave(row.request, self._page_tokens, returns=row.returns)
            leaves.append(message)
            if store is not None:
                self.to_cache.append(store)
            if row.returns:
                self._send_back(row.request)
        self._leaving.clear()
        return tuple(leaves)

    def _landed(self, result: StepResult) -> list[RunningRow]:
        """The rows of a committed step; none when they have all failed before."""
        flight = next((flight for flight in self._flights if flight.rows is not None), None)
        if flight is not None and flight.step == result.step:
            return self._land(flight)
        if any(token >= 0 for token in result.tokens):
            raise ValueError(f"the result of step {result.step} is not expected now")
        return []

    def _land(self, flight: Flight) -> list[RunningRow]:
        """A step is over; its flight stays while chunks are still to run."""
        rows, flight.rows = flight.rows or [], None
        if not flight.chunks:
            self._flights.remove(flight)
        return rows

    def _apply_aborts(self) -> None:
        """Invariant 4: the one place where cancels take effect."""
        if not self._aborts:
            return
        now_s = self._clock.now()
        for number, timeout in self._aborts.items():
            if (row := self._rows.get(number)) is not None:
                row.request.finish("timeout" if timeout else "cancelled", now_s)
                self._ended(row)
        self._aborts.clear()

    def _expire(self, now_s: float) -> None:
        self._deadline_s = _NEVER_S
        for row in list(self._rows.values()):
            deadline_s = row.request.deadline_s
            if deadline_s is None:
                continue
            if deadline_s <= now_s:
                row.request.finish("timeout", now_s)
                self._ended(row)
            else:
                self._deadline_s = min(self._deadline_s, deadline_s)

    def _ended(self, row: RunningRow, *, leaves: bool = True) -> None:
        """Forget a row that has its final event; it leaves the batch with the next plan, if it is in it."""
        self.to_admission.append(RowDone(row.request.row))
        if self._forget(row) and leaves:
            self._leaving[row.request.row] = row

    def _send_back(self, request: Request) -> None:
        """A row that has left, or will with the plan being built, queues again."""
        if request.finished:
            self.to_admission.append(RowDone(request.row))
            return
        request.send_back(leader=request.row)
        self.to_admission.append(Requeue((request,)))

    def _forget(self, row: RunningRow) -> bool:
        """Take a row out of decode's books; True when it is in the batch and must leave it."""
        request = row.request
        del self._rows[request.row]
        if self._active.pop(request.row, None) is not None:
            return True
        group = self._joining.get(request.leader)
        if group is not None and row in group:
            group.remove(row)
            if not group:
                del self._joining[request.leader]
                self._desk.discard(request.leader)
        return False

    def _report(self, chunks: tuple[ChunkDone, ...], active_bytes: int = 0) -> None:
        self._desk.waiting_for_prefill = True
        self.to_prefill.append(ChunksDone(chunks, self.decoding, active_bytes))
