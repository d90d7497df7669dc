"""Random arrivals on a simulated device, whose transients are up to twice what the runtime thinks.

No schedule passes the line (the device raises, and the troupe would die of it), every request ends, whatever is not
refused gets the oracle's tokens, and nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_troupe.actors.admission_core import STALL_S
from mlx_troupe.runtime.errors import InvalidRequest, Overloaded
from tests.actors.device import Device
from tests.actors.parts import endings, expected
from tests.actors.troupe import Stage, on_stage
from tests.fake_engine import Costs

GAP_S = 0.5
"""A chunk may last the stall target."""


@dataclass(frozen=True)
class Arrival:
    """One client."""

    pause: int
    prompt: int
    max_tokens: int
    n: int
    family: int
    leaves_after: int | None


ARRIVAL = st.builds(
    Arrival,
    pause=st.sampled_from([0, 0, 0, 1, 20]),
    prompt=st.one_of(st.integers(1, 60), st.integers(1, 900)),
    max_tokens=st.one_of(st.integers(1, 30), st.integers(1, 300)),
    n=st.sampled_from([1, 1, 1, 2]),
    family=st.integers(0, 2),
    leaves_after=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 100)),
)
# From barely one long row to plenty.
SETTINGS = st.fixed_dictionaries(
    {
        "memory_limit_bytes": st.sampled_from([300_000, 400_000, 500_000, 700_000, 2_000_000]),
        "max_rows": st.sampled_from([4, 32, 32]),
        "prefill_chunk_tokens": st.sampled_from([64, 512]),
        "cache_pages": st.sampled_from([0, 8, 200]),
        "seed": st.integers(0, 1 << 20),
    }
)


async def play(arrivals: list[Arrival], *, overlap: bool, seed: int, cache_pages: int, **config) -> tuple[int, int]:
    """Run a day; how many were refused, and how many rows were put back."""
    draws = random.Random(seed)
    device = Device(config["memory_limit_bytes"], draws)
    refused = 0
    async with (
        on_stage(
            overlap=overlap,
            device=device,
            costs=Costs(step_s=0.01, token_s=1e-4),
            cache_pages=cache_pages * 16,
            **config,
        ) as stage,
        asyncio.TaskGroup() as leaving,
    ):
        for arrival in arrivals:
            await stage.turns(arrival.pause)
            stage.troupe.tick()
            prompt = [(arrival.family * 31 + place) % 64 for place in range(arrival.prompt)]
            try:
                stage.troupe.check_memory(arrival.prompt + arrival.max_tokens)
                rows = await stage.submit(prompt, arrival.max_tokens, n=arrival.n, seed=arrival.family)
            except (InvalidRequest, Overloaded) as error:
                assert error.code in {"memory_limit_exceeded", "overloaded"}  # noqa: PT017
                refused += 1
                continue
            if arrival.leaves_after is not None:
                leaving.create_task(leave(stage, rows[0].request_id, arrival.leaves_after))
        await stage.turns(130)
        await stage.finish()
        for row in stage.rows:
            assert len(endings(row)) == 1
            assert row.output == expected(row)[: len(row.output)]
            assert row.finish_reason in {"length", "cancelled"}, row.finish_reason
            if row.finish_reason == "length":
                assert len(row.output) == row.max_tokens
        assert device.peak_bytes <= device.line_bytes
        assert_nobody_starved(stage)
        return refused, stage.troupe.cast.decode.core.preempted


def assert_nobody_starved(stage: Stage) -> None:
    """First come, first in; the head of the queue is held for less than the stall limit; rows at work go on."""
    came_in = [row for row in stage.rows if row.admitted_s is not None]
    since_s = 0.0
    for row in came_in:
        assert row.admitted_s >= since_s, "it overtook one that came before"
        assert row.admitted_s - max(since_s, row.arrived_s) < STALL_S
        since_s = row.admitted_s
    for row in came_in:
        times = stage.engine.token_times.get(row.row, [])
        if not row.returns and times:
            gaps = [later - earlier for earlier, later in itertools.pairwise([row.admitted_s, *times])]
            assert max(gaps[1:], default=0.0) <= GAP_S
            assert gaps[0] < STALL_S


async def leave(stage, request_id: str, turns: int) -> None:
    await stage.turns(turns)
    stage.troupe.cancel(request_id)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(ARRIVAL, min_size=6, max_size=16), SETTINGS, st.booleans())
def test_no_schedule_passes_the_line(arrivals: list[Arrival], setting: dict, overlap: bool) -> None:
    asyncio.run(play(arrivals, overlap=overlap, **setting))


@pytest.mark.heavy
@settings(max_examples=1500, deadline=None)
@given(st.lists(ARRIVAL, min_size=1, max_size=20), SETTINGS, st.booleans())
def test_no_schedule_of_many_passes_the_line(arrivals: list[Arrival], setting: dict, overlap: bool) -> None:
    asyncio.run(play(arrivals, overlap=overlap, **setting))


async def test_rows_that_outgrow_the_plan_are_put_back_and_all_end_whole() -> None:
    arrivals = [Arrival(0, 20, 800, 1, family, None) for family in range(8)]
    refused, preempted = await play(
        arrivals,
        overlap=True,
        seed=1,
        memory_limit_bytes=1_000_000,
        max_rows=16,
        prefill_chunk_tokens=64,
        cache_pages=0,
    )
    assert refused == 0
    assert preempted > 0
