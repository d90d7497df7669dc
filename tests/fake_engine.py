"""An engine without a model: its tokens come from an oracle, and it checks every word of the protocol.

The next token is a mix of the row's seed and of *every* token in its KV, so a chunk restored from wrong pages, a row
joined from wrong KV or a step out of order gives other tokens. `oracle` computes what a row must give. Time is virtual:
costs are added to a ManualClock, if one is given. Works inline and on a thread.
"""

from __future__ import annotations

import threading
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_troupe.runtime.clock import Clock, ManualClock, MonotonicClock
from mlx_troupe.runtime.engine_protocol import EngineFacts, StepMessage
from mlx_troupe.runtime.events import PositionLogprobs, TokenLogprob
from mlx_troupe.runtime.messages.decode import ChunkOutcome, ChunksResult, RowsFailed, StepResult
from mlx_troupe.runtime.messages.executor import NO_PAGE, Chunk, JoinRow, LeaveRow, StepPlan
from mlx_troupe.runtime.messages.memory_enforcer import MemorySample
from mlx_troupe.runtime.page_blob import ArraySpec, PageBlob, PageLayout
from mlx_troupe.runtime.prefix_page import token_key
from mlx_troupe.runtime.reading import ChunkReading
from mlx_troupe.runtime.request import PLACEHOLDER
from tests.actors.oracle import Costs, Faults, ProtocolError, check, mix, oracle, sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.actors.device import Device

__all__ = ["Costs", "FakeEngine", "Faults", "ProtocolError", "oracle"]


@dataclass
class FakeRow:
    """A row in the batch: the tokens in its KV, and the one that goes in next."""

    kv: list[int]
    state: int
    token: int
    join: JoinRow
    position: int


class FakeEngine:
    """See the module.

    Args:
        facts: `overlap` says when steps are committed.
        page_tokens: tokens of a page.
        clock: moved by the costs when it is a ManualClock.
        record: keep all plans in `plans`, and in `token_times` when each row's tokens were emitted.
    """

    def __init__(
        self,
        facts: EngineFacts | None = None,
        *,
        page_tokens: int = 4,
        clock: Clock | None = None,
        costs: Costs | None = None,
        record: bool = True,
    ) -> None:
        self.facts = facts or EngineFacts(vocab_size=64, context_length=4096, page_bytes=16)
        self.page_tokens = page_tokens
        self.clock: Clock = clock or MonotonicClock()
        self.costs = costs or Costs()
        self.faults = Faults()
        self.plans: list[StepPlan] = []
        self.token_times: dict[int, list[float]] = {}
        self.rows: dict[int, FakeRow] = {}
        self.staged: dict[int, list[int]] = {}
        self.aside: dict[int, dict[int, tuple[int, ...]]] = {}
        self.pages: dict[int, tuple[int, ...]] = {}
        self.computed_tokens = 0
        self.memory = MemorySample(0, 0, 0, 0.0)
        self.pool_clears = 0
        self.device: Device | None = None
        self._record = record
        self._step = 0
        self._failed: set[int] = set()
        self._gone: set[int] = set()
        self._ever_staged: set[int] = set()
        self._outstanding: StepResult | None = None
        self._outstanding_rows: dict[int, tuple[int, ...]] = {}
        self._busy = threading.Lock()

    # --- one plan ---------------------------------------------------------------------------------------------------

    def run(self, plan: StepPlan, emit: Callable[[StepMessage], None]) -> None:
        """See `Engine.run`."""
        check(self._busy.acquire(blocking=False), "run was called while it ran")
        try:
            self._run(plan, emit)
        finally:
            self._busy.release()

    def _run(self, plan: StepPlan, emit: Callable[[StepMessage], None]) -> None:
        self._step += 1
        check(plan.step == self._step, f"plan {plan.step} came where {self._step} was due")
        if self.faults.die_at_step == plan.step:
            raise RuntimeError("the device is on fire")
        if self._record:
            self.plans.append(plan)
        for leave in plan.leaves:
            self._leave(leave)
        for join in plan.joins:
            self._join(plan, join, emit)
        for row in plan.discards:
            check(row in self._ever_staged, f"row {row} was discarded but never staged")
            self._ever_staged.remove(row)
            self.staged.pop(row, None)
        if self.device is not None:
            self.device.settle(self)
        result = self._launch(plan, emit)
        previous, self._outstanding = self._outstanding, result
        self._commit(previous, emit)
        if plan.chunks or self.facts.overlap == "off":
            self._commit(self._outstanding, emit)
            self._outstanding = None
        if plan.chunks:
            check(len({chunk.row for chunk in plan.chunks}) == len(plan.chunks), "two chunks of one row in a plan")
            emit(self._chunks(plan))

    def _launch(self, plan: StepPlan, emit: Callable[[StepMessage], None]) -> StepResult | None:
        if not plan.rows:
            return None
        check(len(set(plan.rows)) == len(plan.rows), "a row is twice in a plan")
        unnamed = set(self.rows) - set(plan.rows)
        check(not unnamed, f"rows {unnamed} are neither in the plan nor have they left")
        failing = tuple(row for row in plan.rows if row in self.faults.step_rows and row in self.rows)
        for row in failing:
            del self.rows[row]
            self._failed.add(row)
        if failing:
            emit(RowsFailed(plan.step, failing, "RuntimeError: injected"))
        if self._shaken(plan):
            self._commit_outstanding(emit)
            emit(RowsFailed(plan.step, plan.rows, "RuntimeError: injected", self.faults.kind))
            self._failed.update(self.rows)
            self.rows.clear()
            return None
        for row in [row for row in self.rows if self.faults.strikes(self.faults.bad_state, row)]:
            del self.rows[row]
            self._failed.add(row)
            emit(RowsFailed(plan.step, (row,), "not finite", "state"))
        self._spend(self.costs.step_s + self.costs.row_s * len(plan.rows))
        tokens = tuple([self._next(row) for row in plan.rows])
        if not any(row in self.rows for row in plan.rows):
            return None  # the engine has nothing to launch, hence no result
        self._outstanding_rows[plan.step] = plan.rows
        logprobs = {
            row: PositionLogprobs(TokenLogprob(token, -1.0))
            for row, token in zip(plan.rows, tokens, strict=True)
            if row in self.rows and self.rows[row].join.sampling.top_logprobs is not None
        }
        active = 0 if self.device is None else self.device.step(self)
        return StepResult(plan.step, tokens, logprobs, self.costs.step_s + self.costs.row_s * len(plan.rows), active)

    def _shaken(self, plan: StepPlan) -> bool:
        poisoned = [row for row in plan.rows if row in self.rows and self.faults.strikes(self.faults.poison, row)]
        shaken = plan.step in self.faults.shaken_steps
        return bool(self.rows) and (shaken or bool(poisoned))

    def _commit_outstanding(self, emit: Callable[[StepMessage], None]) -> None:
        result, self._outstanding = self._outstanding, None
        self._commit(result, emit)

    def _next(self, number: int) -> int:
        row = self.rows.get(number)
        if row is None:
            check(number in self._failed, f"row {number} is in a plan but not in the batch")
            return PLACEHOLDER
        check(row.token >= 0, f"row {number} was fed a placeholder")
        row.kv.append(row.token)
        row.state = mix(row.state, row.token)
        check(len(row.kv) <= self.facts.context_length, f"row {number} outgrew the context")
        join = row.join
        forbidden = join.suppress if row.position < join.suppress_until else ()
        row.token = sample(row.state, join.sampling.seed or 0, self.facts.vocab_size, forbidden)
        row.position += 1
        return row.token

    def _commit(self, result: StepResult | None, emit: Callable[[StepMessage], None]) -> None:
        if result is None:
            return
        for row, token in zip(self._outstanding_rows.pop(result.step), result.tokens, strict=True):
            if token != PLACEHOLDER and self._record:
                self.token_times.setdefault(row, []).append(self.clock.now())
        emit(result)

    # --- rows -------------------------------------------------------------------------------------------------------

    def _join(self, plan: StepPlan, join: JoinRow, emit: Callable[[StepMessage], None]) -> None:
        check(join.row not in self.rows, f"row {join.row} joined twice")
        self._gone.discard(join.row)
        self._failed.discard(join.row)
        check(join.row in plan.rows, f"row {join.row} joins a plan that does not name it")
        kv = self.staged.get(join.source, [])
        check(join.staged_tokens == 0 or join.source in self.staged, f"row {join.source} has no staged KV")
        check(len(kv) == join.staged_tokens, f"row {join.row} joins {len(kv)} tokens, told {join.staged_tokens}")
        check(not join.history or list(join.history) == [*kv, join.token], "the history is not the prompt")
        if join.row in self.faults.join_rows:
            self._failed.add(join.row)
            emit(RowsFailed(plan.step, (join.row,), "RuntimeError: injected"))
            return
        state = 0
        for token in kv:
            state = mix(state, token)
        self.rows[join.row] = FakeRow(list(kv), state, join.token, join, join.position)

    def _leave(self, leave: LeaveRow) -> None:
        check(leave.row not in self._gone, f"row {leave.row} left twice")
        row = self.rows.pop(leave.row, None)
        if row is None:
            check(leave.row in self._failed, f"row {leave.row} left but was not in the batch")
            return
        self._gone.add(leave.row)
        self._put_aside(leave.row, row.kv, leave.stash)

    def _put_aside(self, row: int, kv: list[int], ends: tuple[int, ...]) -> None:
        for end in ends:
            check(0 < end <= len(kv), f"the piece up to {end} of row {row} is not complete")
            self.aside.setdefault(row, {})[end] = tuple(kv[:end])

    # --- prefill ----------------------------------------------------------------------------------------------------

    def _chunks(self, plan: StepPlan) -> ChunksResult:
        active = 0 if self.device is None else self.device.active_bytes(self)
        self._ever_staged.update(chunk.row for chunk in plan.chunks)
        if 0 < plan.chunks_below_bytes < active:
            outcomes = tuple([ChunkOutcome(chunk.row, 0.0, crowded=True) for chunk in plan.chunks])
        else:
            transients = [0] * len(plan.chunks) if self.device is None else self.device.chunks(self, plan.chunks)
            outcomes = tuple([self._chunk(*both) for both in zip(plan.chunks, transients, strict=True)])
        return ChunksResult(plan.step, outcomes, 0 if self.device is None else self.device.active_bytes(self))

    def _chunk(self, chunk: Chunk, transient: int) -> ChunkOutcome:
        check(chunk.tokens or chunk.restore_pages, f"the chunk of row {chunk.row} is empty")
        seconds = self.costs.chunk(len(chunk.tokens), chunk.start)
        self._spend(seconds)
        if self.faults.strikes(self.faults.bad_chunks, chunk.row):
            self.staged.pop(chunk.row, None)
            return ChunkOutcome(chunk.row, seconds, "RuntimeError: injected", fault="state")
        if chunk.row in self.faults.chunk_rows:
            self.staged.pop(chunk.row, None)
            return ChunkOutcome(chunk.row, seconds, "RuntimeError: injected")
        if chunk.start == chunk.restore_tokens:
            check(chunk.row not in self.staged, f"row {chunk.row} began twice")
            restored = self._restored(chunk)
            if restored is None:
                return ChunkOutcome(chunk.row, 0.0, restore_missed=True)
            self.staged[chunk.row] = restored
        kv = self.staged[chunk.row]
        check(len(kv) == chunk.start, f"row {chunk.row} has {len(kv)} tokens, its chunk starts at {chunk.start}")
        kv.extend(chunk.tokens)
        self.computed_tokens += len(chunk.tokens)
        self._put_aside(chunk.row, kv, chunk.stash)
        return ChunkOutcome(chunk.row, seconds, transient_bytes=transient, reading=self._read(chunk, kv))

    def _read(self, chunk: Chunk, kv: list[int]) -> ChunkReading | None:
        """Log-probabilities are minus the tokens; a vector is the sum of the tokens so far, and the last one."""
        if chunk.reading is None:
            return None
        if chunk.reading.pooling is not None:
            check(not chunk.following, "a vector needs no token behind its chunk")
            return ChunkReading(vector=array("f", [sum(kv), kv[-1]]).tobytes())
        check(len(chunk.following) == 1, "there is no token behind the chunk to score")
        targets = (*chunk.tokens[1:], *chunk.following)
        return ChunkReading(tuple(PositionLogprobs(TokenLogprob(token, -float(token))) for token in targets))

    def _restored(self, chunk: Chunk) -> list[int] | None:
        check(bool(chunk.restore_pages) == bool(chunk.restore_tokens), "pages without tokens, or the reverse")
        pages = [self.pages.get(page) for page in chunk.restore_pages]
        if None in pages:
            return None
        if not pages:
            return []
        check(-(-chunk.restore_tokens // self.page_tokens) == len(pages), "too many or too few pages to restore")
        kv: list[int] = []
        for page in pages:
            assert page is not None
            check(len(kv) % self.page_tokens == 0, "a page was restored behind a tail")
            check(list(page[: len(kv)]) == kv, "a page was restored behind a prefix that is not its own")
            check(len(kv) < len(page) <= len(kv) + self.page_tokens, "a page is missing in between")
            kv = list(page)
        check(len(kv) >= chunk.restore_tokens, "the pages are too short")
        return kv[: chunk.restore_tokens]

    # --- pages and memory -------------------------------------------------------------------------------------------

    def adopt(self, row: int, pages: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        """See `Engine.adopt`."""
        aside = self.aside.pop(row, {})
        missing = []
        for index, page in pages:
            check(page not in self.pages or aside.get(index) == self.pages[page], f"page id {page} was given twice")
            content = aside.pop(index, None)
            if page == NO_PAGE:
                continue
            if content is None:
                missing.append(page)
            else:
                self.pages[page] = content
        if aside:
            self.aside[row] = aside
        return tuple(missing)

    def drop(self, pages: tuple[int, ...]) -> None:
        """See `Engine.drop`."""
        for page in pages:
            self.pages.pop(page, None)

    def read_page(self, page: int) -> PageBlob | None:
        """See `Engine.read_page`: the page's bytes are its tokens."""
        tokens = self.pages.get(page)
        if tokens is None:
            return None
        low = (len(tokens) - 1) // self.page_tokens * self.page_tokens
        return PageBlob(PageLayout(low, len(tokens), ((ArraySpec("int32", (len(tokens),)),),)), (token_key(tokens),))

    def load_page(self, page: int, blob: PageBlob) -> None:
        """See `Engine.load_page`."""
        check(page not in self.pages, f"page {page} was loaded twice")
        self.pages[page] = tuple(array("i", bytes(blob.buffers[0])))

    def sample_memory(self, *, clear_pool: bool) -> MemorySample:
        """See `Engine.sample_memory`."""
        self.pool_clears += clear_pool
        if self.device is not None:
            return MemorySample(self.device.active_bytes(self), 0, self.device.peak_bytes, self.clock.now())
        return self.memory

    def set_memory_limit(self, limit_bytes: int) -> None:
        """See `Engine.set_memory_limit`."""
        self.memory_limit_bytes = limit_bytes

    def close(self) -> None:
        """See `Engine.close`."""
        self.rows.clear()

    def check_empty(self) -> None:
        """Raise ProtocolError if a row, staged KV or a page put aside is left over."""
        check(not self.rows, f"rows are left in the batch: {list(self.rows)}")
        check(not self.staged, f"staged KV is left: {list(self.staged)}")
        check(not self.aside, f"pages nobody named are left: {self.aside.keys()}")

    def _spend(self, seconds: float) -> None:
        if seconds and isinstance(self.clock, ManualClock):
            self.clock.advance(seconds)
