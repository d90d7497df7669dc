"""Admission's decisions: who waits, who goes in, who is turned away, each with a reason.

Gates for a request that arrives: draining, duplicate id, more rows than there can ever be, queue full.
Gates for the head of the queue, in order: `max_rows`, `retry_alone` (see runtime/faults.py), then `memory` (the
memory-enforcer's pause) and `memory_plan` (what the rows at work and the new ones will need by the model's layout).
These three never hold when nothing runs, since then nothing could end and free any; `memory_others` does while another
engine of the process could. Before the plan holds anything the
prefix cache has to give up what the head lacks: `reclaim` holds until it has. The queue is first come, first
served within a priority; a head that is held holds those behind it. A row that was sent back takes the place it came
in, is never timed out of the queue and never stalled out: its client has had output already.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from ..runtime.errors import InvalidRequest, NotReady, Overloaded
from ..runtime.faults import must_run_alone
from ..runtime.messages.cache_store import SetBudget
from ..runtime.messages.prefill import Admitted, CancelRows
from ..runtime.request import State
from .memory_ledger import planned_lengths

if TYPE_CHECKING:
    from ..runtime.clock import Clock
    from ..runtime.errors import TroupeError
    from ..runtime.messages.admission import CacheHolds
    from ..runtime.messages.cache_store import CacheStoreMessage
    from ..runtime.messages.prefill import PrefillMessage
    from ..runtime.peers import Peer
    from ..runtime.request import Request
    from .memory_ledger import MemoryLedger

STALL_S = 60.0
"""Longest that memory may hold the head of the queue."""
MEMORY_HOLDS = frozenset({"memory", "memory_plan", "memory_others", "reclaim"})
REGROW_SHARE = 0.125
"""The prefix cache gets room back in steps of at least this share of its whole budget."""
_RATE_SMOOTHING = 0.2
_RETRY_S = (1.0, 60.0)


class AdmissionPolicy(msgspec.Struct, frozen=True):
    """Settings of the gates, see RuntimeConfig."""

    max_rows: int = 64
    max_queue: int = 256
    queue_timeout_s: float | None = None


class Waiting:
    """A request in the queue."""

    __slots__ = ("number", "request_id", "rows")

    def __init__(self, rows: tuple[Request, ...], number: int) -> None:
        self.rows = rows
        self.number = number
        self.request_id = rows[0].request_id

    @property
    def returned(self) -> bool:
        """Whether these rows were at work before."""
        return self.rows[0].returns > 0

    @property
    def place(self) -> tuple[int, int]:
        """Order in the queue."""
        return self.rows[0].priority, self.number


class AdmissionCore:
    """Owned by the admission actor, who sends what is in the outbox after each turn.

    It knows every live row, so that at the end of everything it can end them all.

    Attributes:
        holds: how often the head of the queue was found held, by reason.
        rejections: requests turned away, by error code.
        finished: rows that ended, by finish reason.
        requeued: rows that were sent back.
        ledger: plans memory; None when the model's layout is not known.
    """

    def __init__(
        self,
        policy: AdmissionPolicy,
        *,
        clock: Clock,
        ledger: MemoryLedger | None = None,
        peer: Peer | None = None,
    ) -> None:
        self.to_prefill: list[PrefillMessage] = []
        self.to_cache: list[CacheStoreMessage] = []
        self.holds: Counter[str] = Counter()
        self.rejections: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.requeued = 0
        self.draining = False
        self._policy = policy
        self.ledger = ledger
        self._peer = peer
        self._clock = clock
        self._queue: list[Waiting] = []
        self._admitted: dict[int, Request] = {}
        self._live: dict[str, list[Request]] = {}
        self._numbers: dict[str, int] = {}
        self._cancelled: set[str] = set()
        self._number = 0
        self._pause: str | None = None
        self._cache_budget_bytes = 0 if ledger is None else ledger.pages_bytes
        self._cache_over = False
        self._stalled: tuple[Waiting, float] | None = None
        self._last_end_s: float | None = None
        self._end_interval_s = 0.0

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def admitted(self) -> int:
        """Rows let in and not ended."""
        return len(self._admitted)

    @property
    def idle(self) -> bool:
        """True when no row is alive."""
        return not self._live

    def submit(self, rows: tuple[Request, ...]) -> TroupeError | None:
        """Queue a request, or say why not."""
        entry = Waiting(rows, self._number)
        error = self._refusal(entry)
        if error is not None:
            self.rejections[error.code] += 1
            return error
        self._numbers[entry.request_id] = self._number
        self._number += 1
        insort(self._queue, entry, key=lambda waiting: waiting.place)
        self._live[entry.request_id] = list(rows)
        self.settle()  # a burst handled in one turn fills free places before it fills the queue
        return None

    def cancel(self, request_id: str) -> None:
        """End every row of a request; unknown ids are ignored. Some rows may wait while others are at work."""
        for entry in [entry for entry in self._queue if entry.request_id == request_id]:
            self._leave_queue(entry)
            for request in entry.rows:
                self._cancel_row(request)
        if rows := self._live.get(request_id):
            self._cancelled.add(request_id)  # one of them may be on its way back
            self.to_prefill.append(CancelRows(tuple(request.row for request in rows)))

    def row_done(self, row: int) -> None:
        """An admitted row has ended."""
        request = self._admitted.pop(row, None)
        if request is None:
            return  # all have been ended by `fail_all`
        self._count_end(request)
        if request.request_id not in self._live:
            self._measure_rate()

    def requeue(self, rows: tuple[Request, ...]) -> None:
        """Rows that were admitted queue again, at the place in which their request came."""
        waiting = []
        for request in rows:
            if self._admitted.pop(request.row, None) is None:
                continue  # all have been ended by `fail_all`
            if request.request_id in self._cancelled:
                self._cancel_row(request)
            elif request.finished:
                self._count_end(request)
            else:
                waiting.append(request)
        if waiting:
            self.requeued += len(waiting)
            entry = Waiting(tuple(waiting), self._numbers[waiting[0].request_id])
            insort(self._queue, entry, key=lambda other: other.place)

    def pause(self, reason: str | None) -> None:
        """Hold new work for a reason, or stop holding it."""
        self._pause = reason

    def expire(self) -> None:
        """End requests that have waited too long."""
        now_s = self._clock.now()
        for entry in list(self._queue):
            first = entry.rows[0]
            waited_s = now_s - first.arrived_s
            if first.deadline_s is not None and first.deadline_s <= now_s:
                self._leave_queue(entry)
                for request in entry.rows:
                    request.finish("timeout", now_s)
                    self._count_end(request)
            elif entry.returned:
                continue
            elif self._policy.queue_timeout_s is not None and waited_s >= self._policy.queue_timeout_s:
                self._reject(entry, self._overloaded(f"waited {waited_s:.0f} s for admission", "queue_timeout"))
        if self._stalled is not None and now_s - self._stalled[1] >= STALL_S:
            why = self._pause or "too little is left for it"
            text = f"memory held the request for {STALL_S:.0f} s ({why}); send less context or try later"
            self._reject(self._stalled[0], self._overloaded(text, "memory_admission_stalled"))

    def settle(self) -> None:
        """Let in from the head of the queue as long as no gate holds it."""
        self._tell_peers()
        self._let_in()
        self._tell_peers()

    def _tell_peers(self) -> None:
        """What this engine holds and has promised, for the others of its process."""
        if self._peer is None:
            return
        self._peer.rows = len(self._admitted)
        if self.ledger is not None:
            need = self.ledger.need(planned_lengths(self._admitted.values()))
            self._peer.claim_bytes = need.total_bytes - self._peer.overhead_bytes

    def _let_in(self) -> None:
        """Requests from the head on, until one is held."""
        while self._queue:
            head = self._queue[0]
            reason = self._gate(head)
            self._watch_stall(head, reason)
            if reason is not None:
                self.holds[reason] += 1
                if reason == "reclaim" and not self._cache_over:
                    self._reclaim_for(head)
                return
            del self._queue[0]
            now_s = self._clock.now()
            for request in head.rows:
                if not request.finished:  # its owner outside may have ended it, at a shutdown
                    request.move(State.ADMITTED)
                if request.admitted_s is None:
                    request.admitted_s = now_s
                self._admitted[request.row] = request
            self.to_prefill.append(Admitted(head.rows, self._chunk_room()))
        self._regrow_cache()

    def _reclaim_for(self, head: Waiting) -> None:
        """Lower the prefix cache's budget by what the head of the queue lacks."""
        assert self.ledger is not None
        short = self.ledger.shortage_bytes(planned_lengths((*self._admitted.values(), *head.rows)))
        self._cache_over = True  # until it says otherwise
        self._ask_of_cache(max(0, self.ledger.pages_bytes - short))

    def cache_holds(self, answer: CacheHolds) -> None:
        """What the prefix cache takes now."""
        if self.ledger is not None and answer.budget_bytes == self._cache_budget_bytes:
            self.ledger.pages_bytes = max(answer.budget_bytes, answer.bytes)
            self._cache_over = answer.bytes > answer.budget_bytes

    def _ask_of_cache(self, budget_bytes: int) -> None:
        self._cache_budget_bytes = budget_bytes
        self.to_cache.append(SetBudget(budget_bytes))

    def _regrow_cache(self) -> None:
        """Give the prefix cache back what nobody needs; not while prompts are computed in chunks sized without it."""
        ledger = self.ledger
        if ledger is None or self._queue or self._cache_over or ledger.pages_bytes >= ledger.pages_most_bytes:
            return
        if any(request.state not in {State.RUNNING, State.FINISHED} for request in self._admitted.values()):
            return
        spare = -ledger.shortage_bytes(planned_lengths(self._admitted.values()))
        budget = min(ledger.pages_most_bytes, ledger.pages_bytes + spare)
        if budget - ledger.pages_bytes >= REGROW_SHARE * ledger.pages_most_bytes or budget == ledger.pages_most_bytes:
            ledger.pages_bytes = budget
            self._ask_of_cache(budget)

    def set_memory_line(self, line_bytes: int) -> None:
        """What admitted work may be planned to use from now on."""
        if self.ledger is not None:
            self.ledger.line_bytes = line_bytes

    def _chunk_room(self) -> int | None:
        ledger = self.ledger
        return None if ledger is None else ledger.chunk_room_bytes(planned_lengths(self._admitted.values()))

    def fail_all(self, error: TroupeError) -> None:
        """End every live row with an error."""
        now_s = self._clock.now()
        for request in [request for rows in self._live.values() for request in rows]:
            request.fail(error, now_s)
            self._count_end(request)
        self._queue.clear()
        self._admitted.clear()

    def retry_after_s(self) -> float:
        """When a place in the queue should be free: the queue's length times the time between recent ends."""
        low, high = _RETRY_S
        return float(min(high, max(low, math.ceil((len(self._queue) + 1) * self._end_interval_s))))

    def _refusal(self, entry: Waiting) -> TroupeError | None:
        limit = self._policy.max_rows
        if self.draining:
            return NotReady("the server is shutting down; send the request elsewhere", code="draining")
        if entry.request_id in self._live:
            return InvalidRequest(f"a request {entry.request_id!r} is running already", param="request_id")
        if len(entry.rows) > limit:
            return InvalidRequest(f"n is at most {limit}, the number of rows this server runs", param="n")
        at_once = not self._queue and self._gate(entry) is None
        if len(self._queue) >= self._policy.max_queue and not at_once:
            return self._overloaded(f"{len(self._queue)} requests wait already; try later", "overloaded")
        return None

    def _gate(self, head: Waiting) -> str | None:
        """Why the head of the queue may not go in; None when it may."""
        if len(self._admitted) + len(head.rows) > self._policy.max_rows:
            return "max_rows"
        if self._admitted and any(must_run_alone(row.faults) for row in (*head.rows, *self._admitted.values())):
            return "retry_alone"
        if self._pause is not None and self._admitted:
            return "memory"
        return None if self.ledger is None else self._plan_gate(self.ledger, head)

    def _plan_gate(self, ledger: MemoryLedger, head: Waiting) -> str | None:
        short = ledger.shortage_bytes(planned_lengths((*self._admitted.values(), *head.rows)))
        if short <= 0:
            return None
        if self._cache_over:
            return "reclaim"
        if short <= ledger.pages_bytes or (ledger.pages_bytes and not self._admitted):
            return "reclaim"
        more_may_come = self._peer is not None and self._peer.may_get(short)
        if self._admitted:
            return "memory_plan"
        return "memory_others" if more_may_come else None

    def _watch_stall(self, head: Waiting, reason: str | None) -> None:
        if reason not in MEMORY_HOLDS or head.returned:
            self._stalled = None
        elif self._stalled is None or self._stalled[0] is not head:
            self._stalled = (head, self._clock.now())

    def _overloaded(self, text: str, code: str) -> Overloaded:
        return Overloaded(text, retry_after_s=self.retry_after_s(), code=code)

    def _reject(self, entry: Waiting, error: Overloaded) -> None:
        self.rejections[error.code] += 1
        self._leave_queue(entry)
        for request in entry.rows:
            request.fail(error, self._clock.now())
            self._count_end(request)

    def _leave_queue(self, entry: Waiting) -> None:
        self._queue.remove(entry)
        if self._stalled is not None and self._stalled[0] is entry:
            self._stalled = None

    def _cancel_row(self, request: Request) -> None:
        request.finish("cancelled", self._clock.now())
        self._count_end(request)

    def _count_end(self, request: Request) -> None:
        self.finished[str(request.finish_reason)] += 1
        rows = self._live[request.request_id]
        rows.remove(request)
        if not rows:
            del self._live[request.request_id], self._numbers[request.request_id]
            self._cancelled.discard(request.request_id)

    def _measure_rate(self) -> None:
        now_s = self._clock.now()
        if self._last_end_s is not None:
            interval_s = now_s - self._last_end_s
            step = _RATE_SMOOTHING if self._end_interval_s else 1.0
            self._end_interval_s += (interval_s - self._end_interval_s) * step
        self._last_end_s = now_s
