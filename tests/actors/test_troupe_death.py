"""The assembled troupe: whoever dies, everybody is answered; and the engine's thread."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from mlx_troupe.runtime.errors import NotReady
from mlx_troupe.runtime.events import Failed
from mlx_troupe.runtime.mlx_thread import MlxThread
from tests.actors.parts import HeldThread, endings, expected, make_rows
from tests.actors.troupe import Stage, on_stage

# --- death ------------------------------------------------------------------------------------------------------------


async def assert_dead(stage: Stage, text: str) -> None:
    """Everybody was answered, once, and the troupe says why it ended."""
    for row in stage.rows:
        (end,) = endings(row)
        assert isinstance(end, Failed)
        assert text in end.message
    (failure,) = stage.failures
    assert stage.troupe.failure is failure
    with pytest.raises(NotReady):
        await stage.troupe.submit(make_rows(range(5)))
    stage.troupe.cancel("too late")


async def test_the_engines_death_answers_everyone(overlap: bool) -> None:
    async with on_stage(overlap=overlap, max_rows=2) as stage:
        stage.engine.faults.die_at_step = 20
        await stage.submit(range(5), 500)
        await stage.submit(range(2000), 5)
        await stage.submit(range(6), 5)
        await stage.until(lambda: all(row.finished for row in stage.rows))
        await assert_dead(stage, "RuntimeError: the device is on fire")
        assert {row.finish_reason for row in stage.rows} == {"error:engine_failed"}
        assert stage.troupe.cast.executor.failed is not None


@pytest.mark.parametrize("name", ["prefill", "decode", "cache_store", "memory_enforcer"])
async def test_an_actors_death_answers_everyone(name: str) -> None:
    async with on_stage(max_rows=2) as stage:
        await stage.submit(range(5), 500)
        await stage.submit(range(3000), 5)
        await stage.submit(range(6), 5)
        await stage.until(lambda: len(stage.rows[0].output) > 3)
        getattr(stage.troupe.cast, name).ref.tell("nonsense")
        await stage.until(lambda: all(row.finished for row in stage.rows))
        await assert_dead(stage, name.replace("_", "-"))


async def test_admissions_death_answers_everyone_too() -> None:
    async with on_stage(max_rows=1) as stage:
        await stage.submit(range(5), 500)
        await stage.submit(range(6), 5)
        drains = []
        async with anyio.create_task_group() as group:

            async def drain() -> None:
                with pytest.raises(NotReady) as caught:
                    await stage.troupe.drain()
                drains.append(caught.value)

            group.start_soon(drain)
            await stage.turns(5)
            stage.troupe.admission.tell("nonsense")  # type: ignore[arg-type]
        assert len(drains) == 1
        await assert_dead(stage, "admission")


async def test_a_stop_ends_what_is_left() -> None:
    async with on_stage() as stage:
        await stage.submit(range(5), 500)
        await stage.submit(range(500), 500)
        await stage.turns(20)
    for row in stage.rows:
        (end,) = endings(row)
        assert isinstance(end, Failed)
        assert end.code in {"stopped", "actor_died"}
    assert stage.failures == []


async def test_before_it_runs_it_is_not_ready() -> None:
    stage = Stage()
    with pytest.raises(NotReady):
        await stage.troupe.submit(make_rows(range(5)))
    stage.troupe.cancel("nobody")
    for actor in stage.troupe.cast:
        actor._send.close()
        actor._receive.close()


# --- executor ---------------------------------------------------------------------------------------------------------


async def test_the_age_of_the_oldest_step_is_seen() -> None:
    thread = HeldThread()
    async with on_stage(thread=thread) as stage:
        assert stage.troupe.last_step_age_s is None
        await stage.submit(range(5), 3)
        await stage.until(lambda: bool(thread.held))
        stage.clock.advance(7.0)
        assert stage.troupe.last_step_age_s == 7.0
        thread.run()
        assert stage.troupe.last_step_age_s is None


async def test_a_dead_thread_is_an_engine_failure() -> None:
    async with on_stage() as stage:
        await stage.submit(range(5), 500)
        await asyncio.to_thread(stage.troupe.thread_died, MemoryError())
        await stage.until(lambda: all(row.finished for row in stage.rows))
        await assert_dead(stage, "MemoryError")


async def test_jobs_after_a_failure_do_not_run() -> None:
    thread = HeldThread()
    async with on_stage(thread=thread) as stage:
        stage.engine.faults.die_at_step = 1
        await stage.submit(range(5), 3)
        await stage.until(lambda: bool(thread.held))
        thread.run()
        stage.engine.drop = lambda pages: pytest.fail("the engine was used after it had failed")  # type: ignore[method-assign]
        stage.troupe.cast.executor._submit(lambda: stage.engine.drop(()))
        thread.run()
        await stage.until(lambda: stage.rows[0].finished)


async def test_on_a_real_thread(overlap: bool) -> None:
    """The one test with a thread of its own: 300 requests with cancels, the protocol checked on every step."""
    thread = MlxThread("test")
    thread.jobs = 0  # type: ignore[attr-defined]  # `quiet` asks for it; the last turns below wait for real
    try:
        async with on_stage(overlap=overlap, thread=thread, max_rows=16, max_queue=400) as stage:
            for index in range(300):
                await stage.submit(range(index % 37, 2 * (index % 37) + 1), 1 + index % 9, seed=index)
                if index % 7 == 0:
                    stage.troupe.cancel(stage.rows[index // 2].request_id)
            await stage.until(lambda: all(row.finished for row in stage.rows))
            for row in stage.rows:
                assert row.output == expected(row)[: len(row.output)]
                assert len(endings(row)) == 1
    finally:
        assert thread.close(10.0)
