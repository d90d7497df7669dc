"""The assembled troupe: whole lives of requests, cancels, cache and memory."""

from __future__ import annotations

import anyio
import pytest

from mlx_troupe.runtime.errors import InvalidRequest, NotReady, Overloaded
from mlx_troupe.runtime.events import Finished, PrefillProgress, TextDelta
from mlx_troupe.runtime.request import State
from tests.actors.parts import endings, expected, make_rows, text_of
from tests.actors.troupe import on_stage
from tests.fake_engine import Costs


async def test_many_requests_give_the_oracles_tokens(overlap: bool) -> None:
    async with on_stage(overlap=overlap, max_rows=8) as stage:
        for index in range(20):
            await stage.submit(range(index, 2 * index + 1), 1 + index % 7, seed=index)
        await stage.finish()
        for row in stage.rows:
            assert row.output == expected(row)
            assert text_of(row) == "".join(f"<{token}>" for token in row.output)
        assert stage.troupe.statistics().finished == {"length": 20}


async def test_events_arrive_in_order_and_end_once() -> None:
    async with on_stage() as stage:
        rows = await stage.submit(range(40), 6, n=2)
        events = [event async for event in rows[0].events]
        progress = [event.done_tokens for event in events if isinstance(event, PrefillProgress)]
        assert progress == [16, 32, 40]
        for index, row in enumerate(rows):
            mine = [event for event in events if getattr(event, "index", None) == index]
            assert [type(event) for event in mine] == [TextDelta] * 6 + [Finished]
            assert [token for event in mine[:-1] for token in event.tokens] == expected(row)
        await stage.finish()


async def test_usage_tells_phases_apart() -> None:
    async with on_stage(costs=Costs(step_s=1.0, token_s=0.5), stall_target_s=100.0, max_rows=1) as stage:
        first, second = (await stage.submit(range(9), 3))[0], (await stage.submit(range(9), 3))[0]
        await stage.finish()
        usage = second.usage(stage.clock.now())
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (9, 8, 3)
        assert usage.queue_s == pytest.approx(7.0, abs=1.1)
        assert first.usage(0.0).cached_tokens == 0
        assert first.usage(0.0).prefill_s == pytest.approx(4.0, abs=0.1)


# --- cancel, deadline, refusal ----------------------------------------------------------------------------------------

REACHED = {
    State.QUEUED: lambda stage, row: row.state is State.QUEUED,
    State.RESTORING: lambda stage, row: row.state is State.RESTORING,
    State.PREFILLING: lambda stage, row: row.state is State.PREFILLING and row.computed > 0,
    State.RUNNING: lambda stage, row: len(row.output) > 3,
}


@pytest.mark.parametrize("state", list(REACHED), ids=lambda state: state.value)
async def test_cancel_in_every_state(state: State, overlap: bool) -> None:
    async with on_stage(overlap=overlap, max_rows=2) as stage:
        (other,) = await stage.submit(range(5), 60)
        if state is State.QUEUED:
            await stage.submit(range(3), 60)
        rows = make_rows(range(100, 200), 50)
        stage.rows += rows
        async with anyio.create_task_group() as group:
            group.start_soon(stage.troupe.submit, rows)
            await stage.until(lambda: REACHED[state](stage, rows[0]))
        stage.troupe.cancel(rows[0].request_id)
        stage.troupe.cancel("unknown")
        await stage.until(lambda: rows[0].finished)
        assert rows[0].finish_reason == "cancelled"
        await stage.finish()
        assert len(endings(rows[0])) == 1
        assert other.output == expected(other)


async def test_a_running_cancel_takes_one_step() -> None:
    async with on_stage() as stage:
        (row,) = await stage.submit(range(5), 500)
        await stage.until(lambda: len(row.output) > 10)
        stage.troupe.cancel(row.request_id)
        before = stage.engine.plans[-1].step
        await stage.until(lambda: row.finished)
        assert stage.engine.plans[-1].step - before <= 3
        await stage.finish()


async def test_deadlines_end_requests_wherever_they_are() -> None:
    async with on_stage(max_rows=2) as stage:
        (running,) = await stage.submit(range(5), 10_000, deadline_s=10.0)
        (long,) = await stage.submit(range(40_000), 10, deadline_s=10.0)
        (queued,) = await stage.submit(range(6), 10, deadline_s=10.0)
        await stage.until(lambda: len(running.output) > 3)
        stage.clock.advance(11.0)
        stage.troupe.tick()
        await stage.finish()
        assert [row.finish_reason for row in (running, long, queued)] == ["timeout"] * 3


async def test_refusals_are_raised_to_the_caller() -> None:
    async with on_stage(max_rows=1, max_queue=1) as stage:
        await stage.submit(range(5), 60)
        await stage.submit(range(5), 1)
        with pytest.raises(Overloaded) as overloaded:
            await stage.troupe.submit(make_rows(range(5)))
        assert overloaded.value.retry_after_s >= 1.0
        with pytest.raises(InvalidRequest):
            await stage.troupe.submit(make_rows(range(5), n=2))
        await stage.finish()


async def test_drain_waits_for_the_last_row() -> None:
    async with on_stage(max_rows=1) as stage:
        rows = [await stage.submit(range(5), 20) for _ in range(3)]
        await stage.troupe.drain()
        assert all(row.finished for (row,) in rows)
        with pytest.raises(NotReady):
            await stage.troupe.submit(make_rows(range(5)))
        await stage.finish()


async def test_a_flood_of_cancels_is_not_lost() -> None:
    async with on_stage(max_rows=64, inbox=80) as stage:
        rows = [(await stage.submit(range(5), 500))[0] for _ in range(60)]
        await stage.until(lambda: all(len(row.output) > 2 for row in rows))
        for row in rows:
            stage.troupe.cancel("nobody")
            stage.troupe.cancel("nobody")
            stage.troupe.cancel(row.request_id)
        await stage.finish()
        assert {row.finish_reason for row in rows} == {"cancelled"}


# --- cache ------------------------------------------------------------------------------------------------------------


async def test_a_prefix_is_computed_once(overlap: bool) -> None:
    async with on_stage(overlap=overlap) as stage:
        (first,) = await stage.submit(range(100, 141), 10)
        await stage.finish()
        computed = stage.engine.computed_tokens
        (again,) = await stage.submit([*range(100, 141), *first.output, 1, 2], 10)
        await stage.finish()
        # What the first row's output left behind is found as well: 41 + 9 tokens, the last two as a tail.
        assert again.cached == 50
        assert stage.engine.computed_tokens - computed == again.prefill_target - 50
        assert again.output == expected(again)
        statistics = stage.troupe.statistics()
        assert statistics.cache.hit_tokens == 50
        assert statistics.cache.ram_pages == len(stage.engine.pages) > 0


async def test_requests_that_arrive_together_share_their_first_pages() -> None:
    async with on_stage(max_rows=16) as stage:
        for index in range(16):
            await stage.submit([*range(100, 116), index, index], 5)
        await stage.finish()
        assert stage.engine.computed_tokens < 16 + 16 * 3
        assert all(row.output == expected(row) for row in stage.rows)


async def test_choices_share_one_prefill() -> None:
    async with on_stage() as stage:
        rows = await stage.submit(range(33), 12, n=8)
        await stage.finish()
        assert stage.engine.computed_tokens == 32
        assert all(row.output == expected(row) for row in rows)


async def test_lost_pages_cost_time_but_no_answer() -> None:
    async with on_stage() as stage:
        await stage.submit(range(100, 141), 5)
        await stage.finish()
        stage.engine.pages.clear()
        (again,) = await stage.submit(range(100, 141), 5)
        await stage.finish()
        assert again.output == expected(again)
        assert again.cached == 0
        assert stage.troupe.cast.cache_store.core.lost_pages > 0


async def test_a_tiny_cache_keeps_its_budget() -> None:
    async with on_stage(cache_pages=3) as stage:
        for index in range(12):
            await stage.submit(range(index, index + 30), 9)
        await stage.finish()
        assert stage.troupe.cast.cache_store.core.tree.ram_bytes <= 3 * 16
        assert all(row.output == expected(row) for row in stage.rows)


async def test_no_cache_when_the_budget_is_below_a_page() -> None:
    async with on_stage(cache_pages=0) as stage:
        (row,) = await stage.submit(range(30), 9)
        await stage.finish()
        assert row.output == expected(row)
        assert stage.engine.pages == {}


# --- memory -----------------------------------------------------------------------------------------------------------


async def test_over_the_memory_limit_pages_go_and_admission_waits() -> None:
    async with on_stage(memory_limit_bytes=1000) as stage:
        await stage.submit(range(100, 141), 5)
        await stage.finish()
        stage.engine.memory = stage.engine.memory.__class__(1200, 0, 0, 0.0)
        (running,) = await stage.submit(range(5), 400)
        await stage.until(lambda: len(running.output) > 3)
        stage.troupe.tick()
        await stage.until(lambda: stage.troupe.cast.cache_store.core.statistics().evicted_pages > 0)
        await stage.turns(20)
        (held,) = await stage.submit(range(6), 4)
        await stage.turns(50)
        assert held.state is State.QUEUED
        await stage.finish()
        assert held.admitted_s is not None
        assert running.finished


# --- statistics -------------------------------------------------------------------------------------------------------


async def test_statistics() -> None:
    async with on_stage(max_rows=2) as stage:
        await stage.submit(range(5), 30)
        await stage.submit(range(6), 30)
        await stage.submit(range(7), 30)
        await stage.until(lambda: len(stage.rows[1].output) > 3)
        now = stage.troupe.statistics()
        assert (now.running, now.prefilling, now.waiting) == (2, 0, 1)
        assert 0 <= now.steps - stage.engine.plans[-1].step <= 2
        assert now.completion_tokens == sum(len(row.output) for row in stage.rows)
        assert set(now.actors) == {
            "admission",
            "prefill",
            "decode",
            "executor",
            "cache-store",
            "memory-enforcer",
        }
        assert now.actors["decode"].handled > 0
        await stage.finish()
