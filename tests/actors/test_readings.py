"""Prompts that are read rather than continued: scored, or made vectors, in chunks under everybody's fairness."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from mlx_troupe.runtime.events import Embedded, Failed, Finished, PromptLogprobs, TextDelta
from mlx_troupe.runtime.messages.admission import RowDone
from mlx_troupe.runtime.messages.decode import Ready, Withdraw
from mlx_troupe.runtime.reading import PromptReading
from tests.actors.parts import expected, make_row, make_rows
from tests.actors.troupe import on_stage
from tests.fake_engine import Costs

if TYPE_CHECKING:
    from tests.actors.desk import Desk

SCORE = PromptReading(top_logprobs=0)
MEAN = PromptReading(pooling="mean")


def of_kind(events, kind):
    return [event for event in events if isinstance(event, kind)]


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_a_scored_prompt_tells_once_before_its_output(max_tokens: int, overlap: bool) -> None:
    async with on_stage(overlap=overlap) as stage:
        prompt = list(range(7, 50))
        rows = await stage.submit(prompt, max_tokens, n=2, reading=SCORE)
        events = [event async for event in rows[0].events]
        await stage.finish()
    for row in rows:
        mine = [event for event in events if getattr(event, "index", None) == row.index]
        assert isinstance(mine[0], PromptLogprobs)
        assert mine[0].tokens == tuple(prompt)
        assert [entry.chosen.token for entry in mine[0].logprobs] == prompt[1:]
        assert [entry.chosen.logprob for entry in mine[0].logprobs] == [-float(token) for token in prompt[1:]]
        assert len(of_kind(mine, PromptLogprobs)) == 1
        assert row.output == expected(row)[:max_tokens]
        assert of_kind(mine, Finished)[0].reason == "length"
        assert len(of_kind(mine, TextDelta)) == max_tokens


async def test_a_vector_is_pooled_over_all_tokens_and_ends_the_row() -> None:
    async with on_stage() as stage:
        prompt = list(range(100))
        (row,) = await stage.submit(prompt, 0, reading=MEAN)
        events = [event async for event in row.events]
        await stage.finish()
    (found,) = of_kind(events, Embedded)
    assert found.vector == array("f", [sum(prompt), 99]).tobytes()
    assert isinstance(events[-1], Finished)
    assert row.usage(0.0).prompt_tokens == 100


@pytest.mark.parametrize("reading", [SCORE, MEAN, None])
async def test_one_token_prompts(reading: PromptReading | None) -> None:
    async with on_stage() as stage:
        (row,) = await stage.submit([5], 0, reading=reading)
        events = [event async for event in row.events]
        await stage.finish()
    assert isinstance(events[-1], Finished)
    if reading is SCORE:
        assert of_kind(events, PromptLogprobs) == [PromptLogprobs((5,), ())]
    if reading is MEAN:
        assert of_kind(events, Embedded)[0].vector == array("f", [5, 5]).tobytes()


async def test_readings_keep_out_of_the_cache() -> None:
    """What is cached is not computed, so it could not be read."""
    async with on_stage() as stage:
        await stage.submit(range(40), 2)
        await stage.finish()
        (row,) = await stage.submit(range(40), 0, reading=SCORE)
        events = [event async for event in row.events]
        await stage.finish()
    assert row.cached == 0
    assert len(of_kind(events, PromptLogprobs)[0].logprobs) == 39


async def test_vectors_do_not_stall_running_rows() -> None:
    """Invariant `embeddings_are_chunks_under_decode_fairness`: gaps stay near one chunk, and a share of decode."""
    costs = Costs(step_s=0.01, token_s=0.001)
    async with on_stage(costs=costs, stall_target_s=0.1, max_rows=20, prefill_chunk_tokens=1000) as stage:
        (runner,) = await stage.submit(range(10), 300)
        await stage.until(lambda: len(runner.output) > 5)
        for number in range(12):
            await stage.submit(range(number, number + 400), 0, reading=MEAN)
        await stage.finish()
    times = stage.engine.token_times[runner.row]
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) <= 0.1 + 3 * 0.01 + 0.02
    assert max(gaps) > 0.05, "the embeddings ran among the steps"
    assert runner.output == expected(runner)


async def test_a_cancel_ends_a_reading_and_frees_what_is_staged() -> None:
    async with on_stage() as stage:
        (row,) = await stage.submit(range(4000), 0, reading=MEAN, request_id="r")
        await stage.until(lambda: row.computed > 0)
        stage.troupe.cancel("r")
        events = [event async for event in row.events]
        await stage.finish()
    assert of_kind(events, Finished)[0].reason == "cancelled"
    assert not of_kind(events, Embedded)


async def test_a_failed_chunk_is_an_error_and_others_go_on() -> None:
    async with on_stage() as stage:
        (bad,) = await stage.submit(range(4, 44), 0, reading=MEAN)
        stage.engine.faults.chunk_rows.add(bad.row)
        (good,) = await stage.submit(range(30), 0, reading=MEAN)
        events = [event async for event in bad.events]
        assert [event async for event in good.events][-1].reason == "length"
        await stage.finish()
    assert isinstance(events[-1], Failed)


def test_the_row_is_dropped_everywhere_when_its_prompt_is_read(desk: Desk) -> None:
    row = make_row(range(5), 0, reading=MEAN)
    desk.admit(row)
    (chunk,) = desk.chunks()
    assert (chunk.reading, chunk.following) == (MEAN, ())
    assert len(chunk.tokens) == 5
    desk.ran(chunk)
    assert desk.said(Ready) == []
    assert desk.said(Withdraw) == [Withdraw((row.row,))]
    assert desk.core.to_admission == [RowDone(row.row)]
    assert desk.core.idle


def test_scored_chunks_know_the_token_that_follows_and_are_priced_apart(desk: Desk) -> None:
    rows = make_rows(range(20), 1, reading=SCORE)
    desk.admit(*rows)
    plain = desk.core.cost.base_s
    following = []
    while not desk.said(Ready):
        (chunk,) = desk.chunks()
        following.append(chunk.following)
        desk.ran(chunk, seconds=1.0)
    assert following == [(8,), (16,), (19,)]
    assert desk.core.cost.base_s == plain
    assert desk.core.cost.of(scored=True).base_s > 3 * plain
