"""Decode's core against the fake engine, step by step; the invariants of DESIGN section 3 carry their numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from mlx_troupe.actors.decode_core import DecodeCore
from mlx_troupe.runtime.clock import ManualClock
from mlx_troupe.runtime.engine_protocol import EngineFacts, StepMessage
from mlx_troupe.runtime.errors import EngineFailed
from mlx_troupe.runtime.events import Failed, Finished, PositionLogprobs, TextDelta
from mlx_troupe.runtime.messages.admission import RowDone
from mlx_troupe.runtime.messages.cache_store import Store
from mlx_troupe.runtime.messages.decode import ChunksResult, Offer, RowsFailed, StepResult
from mlx_troupe.runtime.messages.executor import Chunk, StepPlan
from mlx_troupe.runtime.messages.prefill import ChunksDone
from mlx_troupe.runtime.request import PLACEHOLDER, Request, State
from mlx_troupe.runtime.sampling_params import SamplingParams
from tests.actors.parts import endings, expected, make_row, make_rows, text_of, waiting_events
from tests.fake_engine import Costs, FakeEngine

PAGE = 4


@dataclass
class Bench:
    """A decode core and an engine with a mailbox between, so that a test decides when each message arrives."""

    overlap: bool = True
    page_tokens: int = PAGE
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        facts = EngineFacts(
            vocab_size=64, context_length=4096, page_bytes=16, overlap="launch" if self.overlap else "off"
        )
        self.engine = FakeEngine(facts, page_tokens=PAGE, clock=self.clock, costs=self.costs)
        self.core = DecodeCore(overlap=self.overlap, page_tokens=self.page_tokens, clock=self.clock)
        self.emitted: list[StepMessage] = []

    def prefill(self, *rows: Request) -> None:
        """Stage the prompt of rows that share it, and hand them to decode."""
        first = rows[0]
        for request in rows:
            request.move(State.ADMITTED)
            request.move(State.PREFILLING)
            request.computed = request.prefill_target
        if first.prefill_target:
            self.core.offer(Offer((Chunk(first.leader, tuple(first.prompt[:-1]), 0),), 0.0))
            self.run_until(lambda: bool(self.core.to_prefill))
            self.core.to_prefill.clear()
        self.core.ready(rows)
        self.core.offer(Offer((), 0.0))

    def launch(self) -> StepPlan | None:
        """Build one plan and run it; what it emits waits in `emitted`."""
        plan = self.core.plan()
        if plan is not None:
            self.engine.run(plan, self.emitted.append)
        return plan

    def deliver(self) -> StepMessage:
        """Hand decode the oldest message."""
        message = self.emitted.pop(0)
        match message:
            case StepResult():
                self.core.commit(message)
            case ChunksResult():
                self.core.chunks_done(message)
            case RowsFailed():
                self.core.rows_failed(message)
        return message

    def run_until(self, done) -> None:  # noqa: ANN001
        """Go on as the actor would: plans as long as there are any, then one message, until `done()`."""
        for _ in range(10_000):
            while self.launch():
                pass
            if done():
                return
            if not self.emitted:
                raise AssertionError("nothing moves any more")
            self.deliver()
        raise AssertionError("no end")

    def finish(self) -> None:
        """Run until decode is idle; then nothing may be left anywhere."""
        self.run_until(lambda: self.core.idle)
        for message in self.core.to_cache:
            assert isinstance(message, Store)
            self.engine.adopt(message.row, tuple((i, 0) for i in range(message.first_page, message.last_page)))
        self.engine.check_empty()


def done_rows(bench: Bench) -> list[int]:
    return [message.row for message in bench.core.to_admission if isinstance(message, RowDone)]


@pytest.fixture(params=[True, False], ids=["overlap", "no_overlap"])
def bench(request) -> Bench:  # noqa: ANN001
    return Bench(overlap=request.param)


# --- the invariants -------------------------------------------------------------------------------------------------


def test_invariant_1_lengths_advance_at_launch_and_tokens_are_filled_at_commit() -> None:
    bench = Bench()
    row = make_row([5, 6, 7], 8)
    bench.prefill(row)
    assert (row.computed, row.output) == (2, [])
    bench.launch()
    assert (row.computed, row.output) == (3, [])
    bench.launch()
    assert (row.computed, row.output) == (4, [])
    assert bench.core.plan() is None, "two plans are in flight"
    bench.deliver()
    assert (row.computed, row.output) == (4, expected(row)[:1])


def test_invariant_1_a_placeholder_is_never_taken_for_a_token() -> None:
    bench = Bench()
    row = make_row([5], 8)
    bench.prefill(row)
    plan = bench.launch()
    assert plan is not None
    with pytest.raises(ValueError, match="placeholder"):
        bench.core.commit(StepResult(plan.step, (PLACEHOLDER,), {}, 0.0))


def test_invariant_2_a_stopped_row_is_in_flight_once_more_and_that_token_is_dropped() -> None:
    bench = Bench()
    row = make_row([5, 6, 7], 8)
    tokens = expected(row)
    row.stop_tokens = frozenset({tokens[1]})
    bench.prefill(row)
    plans = [bench.launch(), bench.launch()]
    bench.deliver()
    plans.append(bench.launch())
    bench.deliver()
    assert row.finished
    assert row.output == tokens[:2]
    assert [row.row in plan.rows for plan in plans if plan] == [True, True, True]
    leaving = bench.launch()
    assert leaving is not None
    assert leaving.rows == ()
    assert [leave.row for leave in leaving.leaves] == [row.row]
    bench.deliver()
    assert row.output == tokens[:2]
    assert len(endings(row)) == 1
    bench.finish()


def test_invariant_2_nothing_is_planned_past_max_tokens(bench: Bench) -> None:
    rows = [make_row([5, 6, 7], length) for length in (1, 2, 5)]
    for row in rows:
        bench.prefill(row)
    bench.finish()
    for row in rows:
        assert row.output == expected(row)
        assert sum(row.row in plan.rows for plan in bench.engine.plans) == row.max_tokens
        assert row.computed == row.prefill_target + row.max_tokens


def test_invariant_2_a_row_leaves_in_the_plan_after_its_last_launch() -> None:
    bench = Bench()
    row, other = make_row([5], 2), make_row([6], 9)
    bench.prefill(row)
    bench.prefill(other)
    bench.launch()
    bench.launch()
    bench.deliver()
    plan = bench.launch()
    assert plan is not None
    assert [leave.row for leave in plan.leaves] == [row.row]
    assert len(row.output) == 1, "its last token is not read yet"
    bench.finish()
    assert row.output == expected(row)


def test_invariant_3_a_row_leaves_once_and_is_in_no_later_plan(bench: Bench) -> None:
    rows = [make_row([5, 6, index], 1 + index % 4) for index in range(9)]
    for row in rows:
        bench.prefill(row)
    bench.core.cancel([rows[3].row, rows[8].row])
    bench.finish()
    for row in rows:
        left = [plan.step for plan in bench.engine.plans if any(leave.row == row.row for leave in plan.leaves)]
        named = [plan.step for plan in bench.engine.plans if row.row in plan.rows]
        assert len(left) == bool(named)
        assert not named or max(named) < left[0]


def test_invariant_4_a_cancel_takes_effect_between_launch_and_commit_only() -> None:
    bench = Bench()
    row = make_row([5, 6], 8)
    bench.prefill(row)
    bench.launch()
    bench.launch()
    bench.core.cancel([row.row])
    assert not row.finished, "two steps are out: the cancel waits for the next commit"
    bench.deliver()
    assert row.finish_reason == "cancelled"
    assert row.output == [], "it comes before the tokens of that commit"
    plan = bench.launch()
    assert plan is not None
    assert [leave.row for leave in plan.leaves] == [row.row]
    bench.finish()
    assert row.output == []


def test_invariant_4_a_cancel_takes_effect_at_once_when_no_step_is_out() -> None:
    bench = Bench()
    row = make_row([5, 6], 8)
    bench.prefill(row)
    bench.core.cancel([row.row])
    assert row.finish_reason == "cancelled"
    bench.finish()
    assert all(row.row not in plan.rows for plan in bench.engine.plans)


def test_invariant_5_a_row_joins_without_a_barrier() -> None:
    bench = Bench()
    first, second = make_row([5, 6], 9), make_row([7], 9)
    bench.prefill(first)
    bench.launch()
    bench.launch()
    bench.deliver()
    bench.prefill(second)
    plan = bench.launch()
    assert plan is not None
    assert plan.rows == (first.row, second.row)
    assert (plan.joins[0].row, plan.joins[0].token) == (second.row, 7)
    assert bench.core.plan() is None, "the step before is still out: nobody waited for it"
    bench.finish()
    assert (first.output, second.output) == (expected(first), expected(second))


def test_invariant_7_overlap_off_gives_the_same_tokens_as_overlap_on() -> None:
    outputs = []
    for overlap in (True, False):
        bench = Bench(overlap=overlap)
        rows = [make_row([9, index], 3 + index, seed=index) for index in range(6)]
        for row in rows:
            bench.prefill(row)
        bench.finish()
        outputs.append([row.output for row in rows])
    assert outputs[0] == outputs[1]


# --- flow -----------------------------------------------------------------------------------------------------------


def test_the_last_step_is_flushed(bench: Bench) -> None:
    row, other = make_row([5, 6], 3), make_row([7, 8], 3)
    bench.prefill(row)
    bench.prefill(other)
    bench.finish()
    assert row.finished
    assert other.finished
    assert sorted(done_rows(bench)) == sorted([row.row, other.row])


def test_a_failed_last_row_is_flushed_by_an_empty_plan() -> None:
    bench = Bench()
    row = make_row([5, 6], 8)
    bench.prefill(row)
    bench.launch()
    bench.engine.faults.step_rows.add(row.row)
    bench.launch()
    assert isinstance(bench.deliver(), RowsFailed)
    assert isinstance(bench.emitted[0], StepResult)
    bench.finish()
    assert row.finish_reason == "error:engine_failed"


def test_choices_join_from_their_leader_and_its_kv_is_freed_in_the_same_plan(bench: Bench) -> None:
    rows = make_rows([1, 2, 3, 4, 5], 6, n=3)
    bench.prefill(*rows)
    plan = bench.launch()
    assert plan is not None
    assert [join.source for join in plan.joins] == [rows[0].row] * 3
    assert plan.discards == (rows[0].row,)
    bench.finish()
    assert [row.output for row in rows] == [expected(row) for row in rows]
    assert len({tuple(row.output) for row in rows}) == 3


def test_a_one_token_prompt_joins_without_staged_kv(bench: Bench) -> None:
    row = make_row([5], 3)
    bench.prefill(row)
    plan = bench.launch()
    assert plan is not None
    assert plan.joins[0].staged_tokens == 0
    assert plan.discards == ()
    bench.finish()
    assert row.output == expected(row)


@pytest.mark.parametrize("cancelled", [1, 2])
def test_cancelled_before_the_join(bench: Bench, cancelled: int) -> None:
    rows = make_rows([1, 2, 3], 2, n=2)
    bench.prefill(*rows)
    bench.core.cancel([row.row for row in rows[:cancelled]])
    bench.finish()
    assert [row.finish_reason for row in rows] == ["cancelled"] * cancelled + ["length"] * (2 - cancelled)


def test_cancels_of_unknown_or_ended_rows_are_ignored(bench: Bench) -> None:
    row = make_row([5], 1)
    bench.prefill(row)
    bench.finish()
    bench.core.cancel([row.row, 10_000])
    bench.finish()
    assert row.finish_reason == "length"
    assert done_rows(bench) == [row.row]


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_a_stop_token_is_counted_but_has_no_text(bench: Bench) -> None:
    row = make_row([5, 6, 7], 8)
    tokens = expected(row)
    row.stop_tokens = frozenset({tokens[2]})
    bench.prefill(row)
    bench.finish()
    end = endings(row)[0]
    assert isinstance(end, Finished)
    assert (end.reason, end.stop, end.usage.completion_tokens) == ("stop", tokens[2], 3)
    assert text_of(row) == f"<{tokens[0]}><{tokens[1]}>"


def test_a_stop_string_ends_the_row_and_is_not_sent(bench: Bench) -> None:
    plain = make_row([5, 6, 7], 8)
    tokens = expected(plain)
    row = make_row([5, 6, 7], 8, stop=[f"{tokens[1]}><{tokens[2]}"])
    bench.prefill(row)
    bench.finish()
    end = endings(row)[0]
    assert isinstance(end, Finished)
    assert (end.reason, end.stop) == ("stop", f"{tokens[1]}><{tokens[2]}")
    assert text_of(row) == f"<{tokens[0]}><"
    assert row.output == tokens[:3]


def test_text_held_back_is_released_at_the_end(bench: Bench) -> None:
    row = make_row([5, 6, 7], 4, stop=["never in it"])
    bench.prefill(row)
    bench.finish()
    assert text_of(row) == "".join(f"<{token}>" for token in expected(row))
    assert row.finish_reason == "length"


def test_every_token_is_in_one_delta_even_without_text(bench: Bench) -> None:
    row = make_row([5, 6, 7], 6, stop=["never in it"])
    bench.prefill(row)
    bench.finish()
    deltas = [event for event in waiting_events(row) if isinstance(event, TextDelta)]
    assert [token for delta in deltas for token in delta.tokens] == row.output


def test_min_tokens_suppresses_stop_tokens(bench: Bench) -> None:
    plain = make_row([5, 6, 7], 9)
    early = expected(plain)[1]
    row = make_row([5, 6, 7], 9, min_tokens=5, stop_tokens=frozenset({early}))
    bench.prefill(row)
    join = bench.launch()
    assert join is not None
    assert (join.joins[0].suppress, join.joins[0].suppress_until) == ((early,), 5)
    bench.finish()
    assert len(row.output) >= 5
    assert row.output == expected(row)


def test_logprobs_go_to_the_rows_that_ask(bench: Bench) -> None:
    asks = make_row([5, 6], 3, sampling=SamplingParams(top_logprobs=0))
    plain = make_row([5, 7], 3)
    bench.prefill(asks)
    bench.prefill(plain)
    bench.finish()
    found = [event.logprobs for event in waiting_events(asks) if isinstance(event, TextDelta)]
    assert [entry[0].chosen.token for entry in found if entry] == asks.output
    assert all(isinstance(entry[0], PositionLogprobs) for entry in found if entry)
    assert all(event.logprobs is None for event in waiting_events(plain) if isinstance(event, TextDelta))


def test_penalised_rows_bring_their_history(bench: Bench) -> None:
    row = make_row([5, 6, 7], 2, sampling=SamplingParams(presence_penalty=1.0))
    bench.prefill(row)
    plan = bench.launch()
    assert plan is not None
    assert plan.joins[0].history == (5, 6, 7)
    bench.finish()


def test_text_that_raises_ends_its_row_alone(bench: Bench) -> None:
    bad, good = make_row([5, 6], 4), make_row([5, 7], 4)

    def explode(_token: int) -> str:
        raise KeyError("no such token")

    bad.text.add = explode  # type: ignore[method-assign]
    bench.prefill(bad)
    bench.prefill(good)
    bench.finish()
    assert bad.finish_reason == "error:engine_failed"
    assert good.output == expected(good)


# --- deadlines and faults -------------------------------------------------------------------------------------------


def test_deadlines_are_judged_at_commit(bench: Bench) -> None:
    late, other, far = (
        make_row([5, 6], 50, deadline_s=1.0),
        make_row([5, 7], 50),
        make_row([5, 8], 50, deadline_s=1e9),
    )
    for row in (late, other, far):
        bench.prefill(row)
    bench.run_until(lambda: len(late.output) == 5)
    bench.clock.advance(1.0)
    bench.finish()
    assert late.finish_reason == "timeout"
    assert len(late.output) == 5
    assert (other.output, far.output) == (expected(other), expected(far))


@pytest.mark.parametrize("where", ["step_rows", "join_rows"])
def test_a_failed_row_fails_alone(bench: Bench, where: str) -> None:
    bad, good = make_row([5, 6], 6), make_row([5, 7], 6)
    getattr(bench.engine.faults, where).add(bad.row)
    bench.prefill(bad)
    bench.prefill(good)
    bench.finish()
    end = endings(bad)[0]
    assert isinstance(end, Failed)
    assert (end.code, "injected" in end.message) == ("engine_failed", True)
    assert good.output == expected(good)
    assert sorted(done_rows(bench)) == sorted([bad.row, good.row])


def test_all_rows_may_fail_without_a_result(bench: Bench) -> None:
    rows = [make_row([5, 6], 6), make_row([5, 7], 6)]
    for row in rows:
        bench.prefill(row)
    bench.run_until(lambda: len(rows[0].output) >= 2)
    bench.engine.faults.step_rows.update(row.row for row in rows)
    bench.run_until(lambda: all(row.finished for row in rows))
    after = make_row([5, 8], 3)
    bench.prefill(after)
    bench.finish()
    assert after.output == expected(after)


def test_fail_all_ends_every_row_now_and_later(bench: Bench) -> None:
    running, joining = make_row([5, 6], 9), make_row([5, 7], 9)
    bench.prefill(running)
    bench.launch()
    bench.prefill(joining)
    bench.core.fail_all(EngineFailed("it burnt"))
    later = make_row([5, 8], 9)
    later.move(State.ADMITTED)
    later.move(State.PREFILLING)
    bench.core.ready((later,))
    for row in (running, joining, later):
        assert row.finish_reason == "error:engine_failed"
        assert len(endings(row)) == 1
    assert bench.core.plan() is None
    assert bench.core.running == 0


def test_results_out_of_order_are_refused() -> None:
    bench = Bench()
    row = make_row([5, 6], 9)
    bench.prefill(row)
    bench.launch()
    bench.launch()
    with pytest.raises(ValueError, match="not expected"):
        bench.core.commit(StepResult(99, (1,), {}, 0.0))
    with pytest.raises(ValueError, match="not expected"):
        bench.core.chunks_done(ChunksResult(2, ()))


# --- pages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [1, 4, 5, 8])
@pytest.mark.parametrize("output", [1, 3, 4, 8, 9])
def test_a_leaving_row_stores_the_whole_pages_that_prefill_has_not(bench: Bench, prompt: int, output: int) -> None:
    row = make_row(range(1, prompt + 1), output)
    bench.prefill(row)
    bench.finish()
    first, last = (prompt - 1) // PAGE, (prompt + output - 1) // PAGE
    stores = [message for message in bench.core.to_cache if isinstance(message, Store)]
    if first == last:
        assert stores == []
        return
    assert [(store.first_page, store.last_page) for store in stores] == [(first, last)]
    assert list(stores[0].tokens) == (row.prompt + row.output)[: last * PAGE]


def test_a_row_outside_the_cache_stores_nothing(bench: Bench) -> None:
    row = make_row(range(9), 9, cache=False)
    bench.prefill(row)
    bench.finish()
    assert bench.core.to_cache == []


# --- chunks ---------------------------------------------------------------------------------------------------------


def decoding_bench(step_s: float = 0.1) -> tuple[Bench, Request]:
    """A bench with one long row decoding, each step taking `step_s`."""
    bench = Bench(costs=Costs(step_s=step_s))
    row = make_row([5], 500)
    bench.prefill(row)
    bench.run_until(lambda: len(row.output) == 3)
    return bench, row


def chunk_of(row: int, tokens: int = 8, start: int = 0) -> Chunk:
    return Chunk(row, tuple(range(1, tokens + 1)), start)


def steps_until_chunk(bench: Bench) -> int:
    """Decode steps planned before the one that carries chunks."""
    before = len(bench.engine.plans)
    bench.run_until(lambda: any(plan.chunks for plan in bench.engine.plans[before:]))
    carrier = next(place for place, plan in enumerate(bench.engine.plans[before:]) if plan.chunks)
    return carrier


@pytest.mark.parametrize(("owed_s", "steps"), [(0.0, 0), (0.2, 0), (0.3, 1), (0.55, 4), (1.0, 8)])
def test_a_chunk_waits_until_running_rows_had_their_time(owed_s: float, steps: int) -> None:
    bench, _row = decoding_bench()
    bench.core._desk._decoded_s = 0.0
    bench.core.offer(Offer((chunk_of(900),), owed_s))
    # Two steps count before they are measured: the one in flight and the chunk's own plan's.
    assert steps_until_chunk(bench) == pytest.approx(steps, abs=1)


def test_a_chunk_does_not_wait_when_nothing_decodes() -> None:
    bench = Bench()
    bench.core.offer(Offer((chunk_of(900),), 100.0))
    plan = bench.launch()
    assert plan is not None
    assert len(plan.chunks) == 1


def test_nothing_is_sent_behind_a_chunk_until_prefill_has_answered() -> None:
    bench, row = decoding_bench()
    bench.core.offer(Offer((chunk_of(900),), 0.0))
    bench.run_until(lambda: bool(bench.core.to_prefill))
    report = bench.core.to_prefill.pop()
    assert isinstance(report, ChunksDone)
    assert [(done.row, done.tokens, done.start) for done in report.chunks] == [(900, 8, 0)]
    assert report.decoding_rows == 1
    assert bench.core.plan() is None
    bench.core.offer(Offer((), 0.0))
    assert bench.core.plan() is not None
    assert not row.finished


def test_a_cancel_during_a_chunk_takes_effect_at_once() -> None:
    bench, row = decoding_bench()
    bench.core.offer(Offer((chunk_of(900),), 0.0))
    while not any(plan.chunks for plan in bench.engine.plans):
        if bench.launch() is None:
            bench.deliver()
    while not isinstance(bench.emitted[0], ChunksResult):
        bench.deliver()
    bench.core.cancel([row.row])
    assert row.finish_reason == "cancelled"


def test_a_second_offer_replaces_one_that_is_not_planned() -> None:
    bench, _row = decoding_bench()
    bench.core._desk._decoded_s = 0.0
    bench.core.offer(Offer((chunk_of(900, 100),), 50.0))
    bench.core.offer(Offer((chunk_of(901),), 0.0))
    report = bench.core.to_prefill.pop()
    assert isinstance(report, ChunksDone)
    assert [(done.row, done.dropped, done.tokens) for done in report.chunks] == [(900, True, 0)]
    bench.core.offer(Offer((), 0.0))
    bench.run_until(lambda: bool(bench.core.to_prefill))
    ran = [chunk.row for plan in bench.engine.plans for chunk in plan.chunks]
    assert ran == [901]


def test_withdrawn_rows_are_reported_and_their_kv_is_freed() -> None:
    bench, _row = decoding_bench()
    bench.core.offer(Offer((chunk_of(900),), 0.0))
    bench.run_until(lambda: bool(bench.core.to_prefill))
    bench.core.to_prefill.clear()
    bench.core._desk._decoded_s = 0.0
    bench.core.offer(Offer((Chunk(900, (9,), 8), chunk_of(901)), 50.0))
    bench.core.withdraw([900])
    report = bench.core.to_prefill.pop()
    assert isinstance(report, ChunksDone)
    assert [(done.row, done.dropped) for done in report.chunks] == [(900, True)]
    bench.core.offer(Offer((), 0.0))
    bench.run_until(lambda: 900 not in bench.engine.staged)
    bench.core.withdraw([901])
    bench.core.offer(Offer((), 0.0))
    assert not any(chunk.row == 901 for plan in bench.engine.plans for chunk in plan.chunks)


def test_withdrawn_while_its_chunk_runs() -> None:
    bench = Bench()
    bench.core.offer(Offer((chunk_of(900),), 0.0))
    bench.launch()
    bench.core.withdraw([900])
    bench.deliver()
    bench.core.offer(Offer((), 0.0))
    bench.finish()


def test_chunk_errors_and_missed_restores_are_reported() -> None:
    bench = Bench()
    bench.engine.faults.chunk_rows.add(900)
    bench.core.offer(Offer((chunk_of(900), Chunk(901, (1,), 4, (77,), 4)), 0.0))
    bench.launch()
    bench.deliver()
    report = bench.core.to_prefill.pop()
    assert isinstance(report, ChunksDone)
    failed, missed = report.chunks
    assert (failed.tokens, failed.error) == (0, "RuntimeError: injected")
    assert (missed.tokens, missed.restore_missed, missed.error) == (0, True, None)
