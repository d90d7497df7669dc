"""Random traffic against the fake engine, which checks the protocol on every step.

Every request ends exactly once; its tokens are the oracle's, or a prefix of them when it was ended early; nothing is
left in the engine, the tree or the cores; overlap on and off give the same.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_troupe.runtime.errors import InvalidRequest, Overloaded
from mlx_troupe.runtime.messages.decode import Preempt
from tests.actors.parts import endings, expected, make_rows
from tests.actors.troupe import Stage, on_stage
from tests.fake_engine import Costs

if TYPE_CHECKING:
    from mlx_troupe.runtime.request import Request


@dataclass(frozen=True)
class Visit:
    """One client: when it comes (in turns of the loop after the one before), what it asks, when it leaves."""

    pause: int
    family: int
    prompt: int
    max_tokens: int
    n: int
    stop: int | None
    min_tokens: int
    stop_text: bool
    priority: int
    cache: bool
    leaves_after: int | None
    timeout_s: float | None
    fault: str | None
    passing_fault: str | None
    preempts: int


VISIT = st.builds(
    Visit,
    pause=st.sampled_from([0, 0, 1, 3, 10, 40]),
    family=st.integers(0, 2),
    prompt=st.one_of(st.integers(1, 12), st.integers(1, 120)),
    max_tokens=st.integers(1, 14),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    stop=st.one_of(st.none(), st.integers(0, 63)),
    min_tokens=st.sampled_from([0, 0, 3]),
    stop_text=st.booleans(),
    priority=st.sampled_from([0, 0, 1]),
    cache=st.sampled_from([True, True, True, False]),
    leaves_after=st.one_of(st.none(), st.none(), st.integers(0, 120)),
    timeout_s=st.one_of(st.none(), st.none(), st.floats(0.0, 3.0)),
    fault=st.sampled_from([None] * 12 + ["step_rows", "join_rows", "chunk_rows"]),
    passing_fault=st.sampled_from([None] * 8 + ["poison", "bad_state", "bad_chunks"]),
    preempts=st.sampled_from([0] * 5 + [1, 2]),
)
SETTINGS = st.fixed_dictionaries(
    {
        "max_rows": st.integers(3, 8),
        "max_queue": st.sampled_from([2, 50]),
        "cache_pages": st.sampled_from([0, 1, 5, 40]),
        "prefill_chunk_tokens": st.sampled_from([1, 7, 16, 64]),
        "fair_share": st.sampled_from([0.0, 0.3, 2.0]),
    }
)
COSTS = st.builds(
    Costs,
    step_s=st.sampled_from([0.0, 0.01, 0.1]),
    token_s=st.sampled_from([0.0, 1e-3, 2e-2]),
    depth_s=st.sampled_from([0.0, 1e-5]),
)


def rows_of(visit: Visit, stage: Stage) -> tuple[Request, ...]:
    """The rows of a visit; families share the starts of their prompts."""
    stop_tokens = frozenset() if visit.stop is None else frozenset({visit.stop})
    now_s = stage.clock.now()
    rows = make_rows(
        [(visit.family * 31 + place) % 64 for place in range(visit.prompt)],
        visit.max_tokens,
        n=visit.n,
        stop=["3><"] if visit.stop_text else [],
        arrived_s=now_s,
        stop_tokens=stop_tokens,
        min_tokens=min(visit.min_tokens, visit.max_tokens),
        priority=visit.priority,
        cache=visit.cache,
        deadline_s=None if visit.timeout_s is None else now_s + visit.timeout_s,
        seed=visit.family,
    )
    if visit.fault is not None:
        getattr(stage.engine.faults, visit.fault).add(rows[0].row)
    if visit.passing_fault is not None:
        getattr(stage.engine.faults, visit.passing_fault)[rows[0].row] = 1
    return rows


async def leave(stage: Stage, request_id: str, turns: int) -> None:
    await stage.turns(turns)
    stage.troupe.cancel(request_id)


async def play(visits: list[Visit], *, overlap: bool, **setting) -> list[tuple[Request, ...]]:
    """Run a whole day; the rows of each visit, () where it was refused."""
    played: list[tuple[Request, ...]] = []
    async with on_stage(overlap=overlap, **setting) as stage, asyncio.TaskGroup() as leaving:
        for visit in visits:
            await stage.turns(visit.pause)
            stage.troupe.tick()
            for _ in range(visit.preempts):
                stage.troupe.cast.decode.ref.tell(Preempt("random"))
            rows = rows_of(visit, stage)
            try:
                await stage.troupe.submit(rows)
            except (Overloaded, InvalidRequest):
                played.append(())
                continue
            stage.rows += rows
            played.append(rows)
            if visit.leaves_after is not None:
                leaving.create_task(leave(stage, rows[0].request_id, visit.leaves_after))
        await stage.turns(130)
        stage.troupe.tick()
        await stage.finish()
    return played


def judge(visit: Visit, rows: tuple[Request, ...]) -> None:
    """Each row ended once, for a reason that it may have, with the oracle's tokens."""
    for row in rows:
        assert len(endings(row)) == 1
        truth = expected(row)
        assert row.output == truth[: len(row.output)]
        reasons = {"stop", "length"}
        if visit.leaves_after is not None:
            reasons.add("cancelled")
        if visit.timeout_s is not None:
            reasons.add("timeout")
        if visit.fault is not None:
            reasons.add("error:engine_failed")
        assert row.finish_reason in reasons
        if row.finish_reason == "length":
            assert len(row.output) == row.max_tokens
        if row.finish_reason == "stop" and not visit.stop_text:
            assert row.output == truth
            assert row.output[-1] in row.stop_tokens


TRAFFIC = st.lists(VISIT, min_size=1, max_size=14), SETTINGS, COSTS


def run_both_ways(visits: list[Visit], setting: dict, costs: Costs) -> None:
    """Play with overlap on and off, judge both, and compare."""
    outputs = []
    for overlap in (True, False):
        played = asyncio.run(play(visits, overlap=overlap, costs=costs, **setting))
        for visit, rows in zip(visits, played, strict=True):
            judge(visit, rows)
        outputs.append(played)
    for first, second in zip(*outputs, strict=True):
        for one, other in zip(first, second, strict=False):
            if {one.finish_reason, other.finish_reason} <= {"stop", "length"}:
                assert one.output == other.output
                assert one.finish_reason == other.finish_reason


@settings(max_examples=150, deadline=None, derandomize=True)
@given(*TRAFFIC)
def test_random_traffic(visits: list[Visit], setting: dict, costs: Costs) -> None:
    run_both_ways(visits, setting, costs)


@pytest.mark.heavy
@settings(max_examples=3000, deadline=None)
@given(*TRAFFIC)
def test_much_more_random_traffic(visits: list[Visit], setting: dict, costs: Costs) -> None:
    run_both_ways(visits, setting, costs)
