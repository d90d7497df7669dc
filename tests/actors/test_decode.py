"""Decode's core against the fake engine: flow, tokens and text."""

from __future__ import annotations

import pytest

from mlx_troupe.runtime.events import Finished, PositionLogprobs, TextDelta
from mlx_troupe.runtime.messages.decode import RowsFailed, StepResult
from mlx_troupe.runtime.messages.executor import StepPlan
from mlx_troupe.runtime.sampling_params import SamplingParams
from tests.actors.bench import Bench, done_rows
from tests.actors.parts import endings, expected, make_row, make_rows, text_of, waiting_events


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
    assert bench.engine.plans[-1] == StepPlan(bench.engine.plans[-1].step)


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
