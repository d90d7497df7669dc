"""Engines of one process: what one computes of a prompt holds the streams of the others up as little as its own.

The last tests run two troupes on one virtual device, which does one thing at a time.
"""

from __future__ import annotations

import itertools

import anyio.lowlevel
import pytest

from mlx_troupe.actors.prefill_policy import PrefillPolicy
from mlx_troupe.runtime.clock import ManualClock
from mlx_troupe.runtime.messages.decode import Offer
from mlx_troupe.runtime.messages.prefill import Tick
from mlx_troupe.runtime.peers import Peers
from tests.actors.desk import Desk
from tests.actors.oracle import Costs
from tests.actors.parts import expected, make_row
from tests.actors.troupe import Stage, on_stage

POLICY = PrefillPolicy()
TOKEN_S = 1e-3


def desk_with(board: Peers | None) -> Desk:
    peer = None if board is None else board.join("under test")
    return Desk(page_tokens=0, chunk_tokens=2048, token_s=TOKEN_S, peer=peer)


def chunks_of(desk: Desk) -> list[int]:
    """Sizes of the chunks of a long prompt, each run as fast as predicted, as long as one is offered."""
    desk.admit(make_row(range(5000)))
    sizes = []
    while (offers := desk.said(Offer)) and offers[-1].chunks:
        (chunk,) = offers[-1].chunks
        sizes.append(len(chunk.tokens))
        seconds = len(chunk.tokens) * TOKEN_S
        desk.clock.advance(seconds)
        desk.ran(chunk, seconds=seconds)
    return sizes


def test_an_engine_whose_neighbours_do_nothing_chunks_as_if_alone():
    board = Peers()
    board.join("idle")
    assert chunks_of(desk_with(board)) == chunks_of(desk_with(None))


def test_while_another_engine_decodes_chunks_keep_the_stall_target():
    board = Peers()
    other = board.join("decodes")
    other.decoding = 1
    desk = desk_with(board)
    desk.admit(make_row(range(5000)))
    (chunk,) = desk.chunks()
    assert 100 < len(chunk.tokens) <= POLICY.stall_target_s / TOKEN_S < 2048


def test_after_a_chunk_the_other_engine_has_its_share_of_time():
    board = Peers()
    other = board.join("decodes")
    other.decoding = 1
    desk = desk_with(board)
    desk.admit(make_row(range(5000)))
    (chunk,) = desk.chunks()
    desk.clock.advance(0.4)
    desk.ran(chunk, seconds=0.4)
    assert desk.said(Offer) == [Offer((), 0.0)], "decode is answered, with nothing"
    assert desk.core.peer.wait_s(desk.clock.now()) == pytest.approx(POLICY.fair_share * 0.4)
    desk.core.settle()
    assert desk.said(Offer) == []
    desk.clock.advance(POLICY.fair_share * 0.4)
    desk.core.settle()
    assert len(desk.chunks()) == 1


def test_a_prompt_that_ends_while_it_waits_lets_the_next_engine_go():
    board = Peers()
    other, third = board.join("decodes"), board.join("waits")
    other.decoding = 1
    desk = desk_with(board)
    row = make_row(range(5000))
    desk.admit(row)
    (chunk,) = desk.chunks()
    assert not third.take_turn(desk.clock.now())
    desk.core.cancel([row.row])
    desk.core.settle()
    desk.ran(chunk, seconds=0.0, dropped=True)
    assert third.take_turn(desk.clock.now())


COSTS = Costs(step_s=0.01, token_s=1e-3)
SETTINGS = {"prefill_token_s": 1e-3, "prefill_chunk_tokens": 2048, "fair_share": 0.3, "stall_target_s": 0.2}


def longest_gap(stage: Stage) -> float:
    (times,) = stage.engine.token_times.values()
    return max(after - before for before, after in itertools.pairwise(times))


async def test_two_troupes_on_one_device():
    """Behind the prompts of two other engines a stream waits for one chunk at a time."""
    board, clock = Peers(), ManualClock()

    def troupe(name: str):
        return on_stage(clock=clock, costs=COSTS, peer=board.join(name), cache_pages=0, **SETTINGS)

    async with troupe("streams") as streams, troupe("reads") as reads, troupe("reads too") as too:
        (stream,) = await streams.submit(range(20, 30), 600)
        await streams.until(lambda: streams.troupe.cast.decode.core.running > 0)
        await reads.submit(range(2000), 2)
        await too.submit(range(1500), 2)
        for _ in range(40_000):
            for stage in (reads, too):  # timers are real, and this time is not
                stage.troupe.cast.prefill.ref.tell(Tick())
            await anyio.lowlevel.checkpoint()
            if all(stage.quiet for stage in (reads, too, streams)):
                break
        assert [len(stage.rows[0].output) for stage in (reads, too)] == [2, 2]
        assert stream.output == expected(stream)
        assert longest_gap(streams) <= SETTINGS["stall_target_s"] * 1.3
        assert longest_gap(streams) > 2 * COSTS.step_s, "there were chunks in between"
        reads_chunks = [chunk for plan in reads.engine.plans for chunk in plan.chunks]
        assert max(len(chunk.tokens) for chunk in reads_chunks) <= 200
