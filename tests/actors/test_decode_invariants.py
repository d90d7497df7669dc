"""The invariants of DESIGN section 3 as far as decode keeps them, by their numbers."""

from __future__ import annotations

import pytest

from mlx_troupe.runtime.messages.decode import StepResult
from mlx_troupe.runtime.request import PLACEHOLDER
from tests.actors.bench import Bench
from tests.actors.parts import endings, expected, make_row


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
