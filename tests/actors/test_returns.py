"""Rows that are sent back: after a failed forward and under memory pressure they go on where they were."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mlx_troupe.runtime.errors import EngineFailed, Overloaded
from mlx_troupe.runtime.events import Failed, PrefillProgress, TextDelta
from mlx_troupe.runtime.faults import fault_of, final_error, must_run_alone, retries
from mlx_troupe.runtime.messages.decode import Preempt
from tests.actors.parts import endings, expected, text_of, waiting_events
from tests.actors.troupe import on_stage

if TYPE_CHECKING:
    from mlx_troupe.runtime.request import Request
    from tests.actors.troupe import Stage


def heard(request: Request) -> list[int]:
    """Token ids that the listener got."""
    return [
        token
        for event in waiting_events(request)
        if isinstance(event, TextDelta) and event.index == request.index
        for token in event.tokens
    ]


def assert_whole(request: Request) -> None:
    """The row ran to its end and its listener heard every token once, in order."""
    truth = expected(request)
    assert request.output == truth
    assert heard(request) == truth
    assert text_of(request) == "".join(f"<{token}>" for token in truth)
    assert len(endings(request)) == 1
    progress = [event.done_tokens for event in waiting_events(request) if isinstance(event, PrefillProgress)]
    assert progress == sorted(progress)


async def some_running(stage: Stage, tokens: int = 3) -> None:
    await stage.until(lambda: all(len(row.output) >= tokens for row in stage.rows))


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [4, 7, 12])
async def test_a_failed_step_costs_nobody_a_token(overlap: bool, step: int) -> None:
    async with on_stage(overlap=overlap) as stage:
        stage.engine.faults.shaken_steps = {step}
        for index in range(5):
            await stage.submit(range(3 + 5 * index), 12, seed=index)
        await stage.finish()
        for row in stage.rows:
            assert_whole(row)
        assert any(row.faults == 1 for row in stage.rows)


async def test_rows_that_share_a_prompt_come_back_too(overlap: bool) -> None:
    async with on_stage(overlap=overlap) as stage:
        stage.engine.faults.shaken_steps = {6}
        await stage.submit(range(21), 12, n=3)
        await stage.finish()
        assert [row.faults for row in stage.rows] == [1, 1, 1]
        for row in stage.rows:
            assert row.output == expected(row)


async def test_a_poisonous_request_fails_alone(overlap: bool) -> None:
    """Every forward with it raises: its neighbours are retried with it, then without it, and all of them end well."""
    async with on_stage(overlap=overlap) as stage:
        good = [(await stage.submit(range(3 + index), 20, seed=index))[0] for index in range(3)]
        (bad,) = await stage.submit(range(30), 20)
        stage.engine.faults.poison = {bad.row: 99}
        await stage.finish()
        for row in good:
            assert_whole(row)
        assert bad.finish_reason == "error:engine_failed"
        (after,) = await stage.submit(range(9), 5)
        await stage.finish()
        assert_whole(after)


@pytest.mark.parametrize(("times", "reason"), [(1, "length"), (2, "error:engine_failed")])
async def test_bad_state_is_computed_anew_once(overlap: bool, times: int, reason: str) -> None:
    async with on_stage(overlap=overlap) as stage:
        (bad,) = await stage.submit(range(30), 20)
        (good,) = await stage.submit(range(9), 20)
        await some_running(stage)
        stage.engine.faults.bad_state = {bad.row: times}
        await stage.finish()
        assert_whole(good)
        assert good.returns == 0
        assert bad.finish_reason == reason
        assert heard(bad) == expected(bad)[: len(bad.output)]
        assert not bad.cache, "what was bad may be the cache"


@pytest.mark.parametrize(("times", "reason"), [(1, "length"), (2, "error:engine_failed")])
async def test_a_bad_chunk_is_computed_anew_once(times: int, reason: str) -> None:
    async with on_stage() as stage:
        rows = await stage.submit(range(50), 4, n=2)
        stage.engine.faults.bad_chunks = {rows[0].leader: times}
        await stage.finish()
        assert {row.finish_reason for row in rows} == {reason}
        if reason == "length":
            assert [row.output for row in rows] == [expected(row) for row in rows]


async def test_pages_of_a_bad_chunk_are_forgotten() -> None:
    async with on_stage() as stage:
        await stage.submit(range(50), 4)
        await stage.finish()
        assert stage.engine.pages
        (row,) = await stage.submit(range(50), 4)
        stage.engine.faults.bad_chunks = {row.leader: 1}
        await stage.finish()
        assert_whole(row)
        assert stage.troupe.cast.cache_store.core.lost_pages > 0


async def test_memory_that_stays_short_is_said_to_be_passing() -> None:
    async with on_stage() as stage:
        (row,) = await stage.submit(range(8), 9)
        stage.engine.faults.kind = "memory"
        stage.engine.faults.poison = {row.row: 99}
        await stage.finish()
        (end,) = endings(row)
        assert isinstance(end, Failed)
        assert end.code == "out_of_memory"
        assert end.retry_after_s is not None


@pytest.mark.parametrize(
    ("fault", "faults", "alone", "again"),
    [
        ("row", 0, True, False),
        ("step", 1, False, True),
        ("step", 2, False, True),
        ("step", 3, False, False),
        ("step", 1, True, True),
        ("step", 2, True, False),
        ("memory", 2, False, True),
        ("memory", 3, False, False),
        ("state", 1, False, True),
        ("state", 2, False, False),
    ],
)
def test_retries(fault, faults: int, alone: bool, again: bool) -> None:
    assert retries(fault, faults, alone=alone) is again


def test_what_an_exception_means() -> None:
    assert fault_of(MemoryError(), "step") == "memory"
    assert fault_of(RuntimeError("[metal::malloc] Attempting to allocate 9 bytes"), "step") == "memory"
    assert fault_of(RuntimeError("shapes do not match"), "step") == "step"
    assert fault_of(ValueError("out of memory"), "state") == "state", "MLX says it in a RuntimeError"
    assert isinstance(final_error("memory", "x"), Overloaded)
    assert isinstance(final_error("step", "x"), EngineFailed)
    assert [must_run_alone(faults) for faults in (0, 1, 2)] == [False, False, True]


# --- preemption -------------------------------------------------------------------------------------------------------


async def test_a_preempted_row_goes_on_and_its_pages_were_kept(overlap: bool) -> None:
    async with on_stage(overlap=overlap) as stage:
        (old,) = await stage.submit(range(5), 60)
        (young,) = await stage.submit(range(40), 60)
        await some_running(stage, 9)
        computed = stage.engine.computed_tokens
        stage.troupe.cast.decode.ref.tell(Preempt("a test"))
        await stage.finish()
        for row in (old, young):
            assert_whole(row)
        assert (old.returns, young.returns) == (0, 1)
        again = stage.engine.computed_tokens - computed
        assert again < 2 * 4, f"{again} of {young.prefill_target} tokens were computed again"


async def test_the_only_row_is_not_preempted() -> None:
    async with on_stage() as stage:
        (row,) = await stage.submit(range(5), 30)
        await some_running(stage)
        stage.troupe.cast.decode.ref.tell(Preempt("a test"))
        await stage.finish()
        assert_whole(row)
        assert row.returns == 0


async def test_a_preempted_row_waits_at_the_head_while_memory_is_short(overlap: bool) -> None:
    async with on_stage(overlap=overlap) as stage:
        (old,) = await stage.submit(range(5), 60)
        (young,) = await stage.submit(range(6), 60)
        await some_running(stage, 9)
        cast = stage.troupe.cast
        cast.admission.core.pause("a test")
        cast.decode.ref.tell(Preempt("a test"))
        await stage.until(lambda: young.state.value == "queued")
        (late,) = await stage.submit(range(7), 5)
        stage.clock.advance(1000.0)  # type: ignore[attr-defined]
        stage.troupe.tick()
        await stage.until(lambda: old.finished)
        assert young.output == expected(young)[: len(young.output)]
        assert not late.output, "it came later"
        await stage.finish()
        for row in (old, young, late):
            assert_whole(row)


async def test_a_cancel_that_crosses_a_return_is_not_lost(overlap: bool) -> None:
    async with on_stage(overlap=overlap) as stage:
        (old,) = await stage.submit(range(5), 60)
        (young,) = await stage.submit(range(6), 60)
        await some_running(stage, 9)
        stage.troupe.cast.decode.ref.tell(Preempt("a test"))
        stage.troupe.cancel(young.request_id)
        await stage.finish()
        assert_whole(old)
        assert young.finish_reason == "cancelled"
        assert young.output == expected(young)[: len(young.output)]


async def test_a_row_sent_back_may_time_out() -> None:
    async with on_stage() as stage:
        (old,) = await stage.submit(range(5), 60)
        (young,) = await stage.submit(range(6), 60, deadline_s=stage.clock.now() + 50.0)
        await some_running(stage, 9)
        stage.troupe.cast.admission.core.pause("a test")
        stage.troupe.cast.decode.ref.tell(Preempt("a test"))
        await stage.until(lambda: young.state.value == "queued")
        stage.clock.advance(60.0)  # type: ignore[attr-defined]
        stage.troupe.tick()
        await stage.finish()
        assert young.finish_reason == "timeout"
        assert_whole(old)
