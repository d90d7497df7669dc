"""Decode's core against the fake engine: deadlines, faults, and the pages that leaving rows leave."""

from __future__ import annotations

import pytest

from mlx_troupe.runtime.errors import EngineFailed
from mlx_troupe.runtime.events import Failed
from mlx_troupe.runtime.messages.cache_store import Store
from mlx_troupe.runtime.messages.decode import ChunksResult, StepResult
from mlx_troupe.runtime.request import State
from tests.actors.bench import PAGE, Bench, done_rows
from tests.actors.parts import endings, expected, make_row


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
def test_a_leaving_row_stores_the_pieces_that_prefill_has_not(bench: Bench, prompt: int, output: int) -> None:
    row = make_row(range(1, prompt + 1), output)
    bench.prefill(row)
    bench.finish()
    known = prompt + output - 1
    (store,) = [message for message in bench.core.to_cache if isinstance(message, Store)]
    pages = [end for end in range(PAGE, known + 1, PAGE) if end > prompt - 1]
    assert list(store.ends) == sorted({*pages, known})
    assert list(store.tokens) == (row.prompt + row.output)[:known]


def test_reasoning_that_the_template_drops_is_not_stored(bench: Bench) -> None:
    begins, goes_on = make_row(range(9), 9), make_row([*range(9), 3, 9], 9, reasoning=(3,))
    begins.reasoning = tuple(expected(begins)[:2])
    kept = make_row([3, *range(9, 30)], 9, reasoning=(3,))
    for row in (begins, goes_on, kept):
        bench.prefill(row)
    bench.finish()
    stores = [message.row for message in bench.core.to_cache if isinstance(message, Store)]
    assert stores == [kept.row]


def test_a_row_outside_the_cache_stores_nothing(bench: Bench) -> None:
    row = make_row(range(9), 9, cache=False)
    bench.prefill(row)
    bench.finish()
    assert bench.core.to_cache == []
