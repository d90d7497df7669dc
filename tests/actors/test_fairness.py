"""Fairness of the assembled troupe, in virtual time."""

from __future__ import annotations

from itertools import pairwise

import anyio

from mlx_troupe.actors.troupe import Troupe
from mlx_troupe.runtime.messages.decode import CancelRunning
from tests.actors.troupe import PAGE, on_stage
from tests.fake_engine import Costs

# --- fairness in virtual time -----------------------------------------------------------------------------------------

CPU = Costs(step_s=0.03, row_s=0.002, token_s=3e-3, depth_s=8e-6)
"""SmolLM2-135M on two cores, roughly."""


async def test_fairness_a_long_prompt_beside_a_stream_and_a_short_request() -> None:
    alone_s = 1600 * (CPU.token_s + CPU.depth_s * 800)
    async with on_stage(costs=CPU, prefill_chunk_tokens=2048, prefill_token_s=3e-3, cache_pages=0) as stage:
        (stream,) = await stage.submit(range(20), 2000)
        await stage.until(lambda: len(stream.output) > 5)
        (long,) = await stage.submit(range(1600), 4)
        await stage.until(lambda: long.computed > 300)
        (short,) = await stage.submit(range(30), 4)
        await stage.until(lambda: long.first_token_s is not None)
        stage.troupe.cancel(stream.request_id)
        await stage.finish()
        times = stage.engine.token_times
    between = [time for time in times[stream.row] if long.arrived_s <= time <= times[long.row][0]]
    assert max(after - before for before, after in pairwise(between)) < 0.75, "the stall target, plus a step"
    assert times[short.row][0] - short.arrived_s < 0.5
    assert times[long.row][0] - long.arrived_s < 1.35 * alone_s + 1.0
    assert len(between) * (CPU.step_s + CPU.row_s) > 0.25 * alone_s, "the stream had its share"


async def test_fairness_short_prompts_do_not_starve_a_long_one() -> None:
    async with on_stage(
        costs=CPU, prefill_chunk_tokens=2048, prefill_token_s=3e-3, cache_pages=0, max_rows=16
    ) as stage:
        (long,) = await stage.submit(range(600), 2)
        for index in range(2000):
            if long.finished:
                break
            await stage.submit(range(index, index + 60), 3)
            await stage.until(lambda: stage.troupe.statistics().waiting == 0)
        await stage.finish()
        later = [row for row in stage.rows if row.arrived_s > long.finished_s]
        assert len(later) < 10, "it ended in the middle of the flood"


async def test_many_short_prompts_need_few_plans() -> None:
    async with on_stage(prefill_token_s=1e-5, costs=Costs(token_s=1e-5), max_rows=32, cache_pages=0) as stage:
        async with anyio.create_task_group() as group:
            for _ in range(32):
                group.start_soon(stage.submit, range(10), 80)
        await stage.finish()
        assert sum(bool(plan.chunks) for plan in stage.engine.plans) <= 3
        assert max(len(plan.rows) for plan in stage.engine.plans) == 32


async def test_a_cancel_reaches_decode_after_the_rows(overlap: bool) -> None:
    """CancelRows follows Admitted, and CancelRunning follows Ready, however close they are."""
    async with on_stage(overlap=overlap) as stage:
        for delay in range(60):
            (row,) = await stage.submit(range(PAGE * 3), 50)
            await stage.turns(delay)
            stage.troupe.cancel(row.request_id)
            await stage.finish()
            assert row.finish_reason == "cancelled"


async def test_unknown_cancels_reach_decode_harmlessly() -> None:
    async with on_stage() as stage:
        stage.troupe.cast.decode.ref.tell(CancelRunning((123456,)))
        await stage.submit(range(5), 3)
        await stage.finish()


def test_a_troupe_takes_its_four_parts_by_place() -> None:
    """As the facade builds it."""
    names = Troupe.__init__.__code__.co_varnames[1:5]
    assert names == ("config", "facts", "engine", "thread")


async def test_a_row_that_ends_in_the_turn_it_joins_contends_with_nobody(overlap: bool) -> None:
    async with on_stage(overlap=overlap) as stage:
        await stage.submit(range(20), 1)
        await stage.finish()
        assert stage.troupe.cast.prefill.core._decoding == 0
