"""Chunks that find too much memory in use: how the plan says so, and what prefill makes of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_troupe.actors.prefill_core import PrefillCore
from mlx_troupe.actors.prefill_cost import ChunkCost
from mlx_troupe.actors.prefill_hold import HELD_S, HELD_STEP_S
from mlx_troupe.actors.prefill_keep import KeepRules
from mlx_troupe.actors.prefill_policy import PrefillPolicy, Prompt, chunk_tokens
from mlx_troupe.actors.transients import TRUSTED_AFTER, ChunkMemory
from mlx_troupe.runtime.kv_estimate import KVKind, KVLayout, room_for, transient_bytes
from mlx_troupe.runtime.messages.cache_store import Reclaim
from mlx_troupe.runtime.messages.decode import ChunkOutcome, ChunksResult, Offer, Preempt
from mlx_troupe.runtime.messages.executor import Chunk
from mlx_troupe.runtime.messages.prefill import ChunkDone, ChunksDone
from tests.actors.bench import Bench
from tests.actors.desk import Desk
from tests.actors.parts import make_row

LAYOUT = KVLayout(kinds=(KVKind(None, 100),), activation_bytes=1000.0, score_bytes=1.0)
LINE = 1_000_000


@pytest.fixture
def desk() -> Desk:
    """One that keeps an eye on memory."""
    found = Desk(page_tokens=0)
    memory = ChunkMemory(LAYOUT, 100_000, line_bytes=LINE, abort_bytes=LINE + 100_000)
    found.core = PrefillCore(
        PrefillPolicy(chunk_tokens=256), ChunkCost(1e-4), keep=KeepRules(0), clock=found.clock, memory=memory
    )
    memory.room_bytes = LINE
    return found


def offered(desk: Desk) -> Offer:
    (offer,) = desk.said(Offer)
    return offer


def crowded(desk: Desk, offer: Offer, active_bytes: int, *, decoding: int = 1) -> Offer:
    """The engine found so much in use; returns what prefill offers next."""
    done = tuple(ChunkDone(chunk.row, 0, chunk.start, 0.0, crowded=True) for chunk in offer.chunks)
    desk.core.done(ChunksDone(done, decoding, active_bytes))
    desk.core.settle()
    return offered(desk)


def test_a_crowded_chunk_is_offered_again_at_once_and_smaller(desk: Desk) -> None:
    desk.admit(make_row(range(300)))
    first = offered(desk)
    assert len(first.chunks[0].tokens) == 256
    assert 0 < first.below_bytes < LINE
    second = crowded(desk, first, first.below_bytes + 100_000)
    assert 32 < len(second.chunks[0].tokens) < 256
    assert second.below_bytes >= first.below_bytes + 100_000
    assert second.after_decode_s == 0.0
    assert desk.core.to_cache == []


def test_a_crowded_smallest_chunk_waits_then_has_rows_put_back(desk: Desk) -> None:
    desk.admit(make_row(range(300)))
    offer = crowded(desk, offered(desk), LINE)
    assert len(offer.chunks[0].tokens) == 32
    assert offer.below_bytes < LINE + 100_000, "its room up to the stable line is asked for, twice as dear"
    offer = crowded(desk, offer, LINE + 50_000)
    assert offer.after_decode_s == HELD_STEP_S
    assert desk.core.to_cache == [Reclaim(LINE + 50_000 - offer.below_bytes)], "the prefix cache gives what is lacking"
    desk.clock.advance(HELD_S - 0.1)
    offer = crowded(desk, offer, LINE + 50_000)
    assert desk.said(Preempt) == []
    desk.clock.advance(0.1)
    offer = crowded(desk, offer, LINE + 50_000)
    (preempt,) = desk.said(Preempt)
    assert preempt.last
    offer = crowded(desk, offer, LINE + 50_000)
    assert desk.said(Preempt) == [], "one at a time"
    desk.core.done(ChunksDone((ChunkDone(offer.chunks[0].row, 32, 0, 0.01),), 1, LINE // 2))
    desk.core.settle()
    assert not desk.core.hold.held
    offer = offered(desk)
    assert len(offer.chunks[0].tokens) > 32, "and then as usual"
    assert offer.after_decode_s == pytest.approx(0.3 * 0.01)


def test_a_smallest_chunk_has_its_room_when_nobody_decodes(desk: Desk) -> None:
    desk.admit(make_row(range(300)))
    offer = crowded(desk, offered(desk), LINE, decoding=0)
    assert len(offer.chunks[0].tokens) == 32
    assert offer.below_bytes == 0


def test_the_caches_of_a_prompt_are_counted_once_they_grow(desk: Desk) -> None:
    memory = desk.core.memory
    assert memory is not None
    desk.admit(make_row(range(2000)))
    (chunk,) = offered(desk).chunks
    prompt = desk.core._prompts[chunk.row]
    assert memory.widened_bytes(prompt) == 256 * 100
    desk.ran(chunk)
    assert memory.widened_bytes(prompt) == (room_for(1999) - 256) * 100, "its second chunk makes room for all of it"
    (chunk,) = desk.chunks()
    desk.ran(chunk)
    assert memory.widened_bytes(prompt) == 0


@given(
    active=st.integers(0, LINE), depth=st.integers(0, 4000), widened=st.integers(0, 100_000), dear=st.floats(0.1, 4.0)
)
def test_a_chunk_that_fits_may_begin_and_one_token_more_may_not(
    active: int, depth: int, widened: int, dear: float
) -> None:
    memory = ChunkMemory(LAYOUT, 100_000, line_bytes=LINE, abort_bytes=LINE + 100_000)
    for _ in range(TRUSTED_AFTER):
        memory.observe(100, 0, int(dear * transient_bytes(LAYOUT, 100, 0)))
    memory.used(active or 1)
    tokens = memory.tokens_within(depth, widened)
    if tokens:
        assert memory.begins_below(tokens, depth, widened, smallest=False) >= active - 1
    assert memory.begins_below(tokens + 1, depth, widened, smallest=False) <= active + 1


def test_the_plan_carries_the_bound_and_the_report_what_came_of_it() -> None:
    bench = Bench()
    bench.core.offer(Offer((Chunk(900, (1, 2), 0),), 0.0, 12_345))
    plan = bench.launch()
    assert plan is not None
    assert plan.chunks_below_bytes == 12_345
    bench.core.chunks_done(ChunksResult(plan.step, (ChunkOutcome(900, 0.0, crowded=True),), 77))
    report = bench.core.to_prefill.pop()
    assert report == ChunksDone((ChunkDone(900, 0, 0, 0.0, crowded=True),), 0, 77)


def test_larger_caches_count_as_time_of_the_chunk_that_makes_them() -> None:
    """A gigabyte of caches: the second chunk makes room for it, and its tokens get what is left of the target."""
    wide = KVLayout(kinds=(KVKind(None, 1 << 17),), activation_bytes=1000.0, score_bytes=1.0)
    memory = ChunkMemory(wide, 0, line_bytes=1 << 40, abort_bytes=1 << 40)
    memory.used(1)
    cost, policy = ChunkCost(1e-3), PrefillPolicy(stall_target_s=0.5)
    prompt = Prompt((make_row(range(2000)),), 0.0, 0)
    prompt.computed, prompt.staged_room = 256, 256
    grown = memory.widened_bytes(prompt)
    usual = chunk_tokens(prompt, cost, policy, contended=True)
    assert chunk_tokens(prompt, cost, policy, contended=True, memory=memory) == pytest.approx(
        usual * (0.5 - grown * 1e-9) / 0.5, rel=0.05
    )
    for _ in range(6):
        cost.observe_widening(100, 256, cost.seconds(100, 256) + 0.4, grown)
    assert cost.widening_s(grown) == pytest.approx(0.4, rel=0.05)
    assert chunk_tokens(prompt, cost, policy, contended=True, memory=memory) < usual / 4
    prompt.staged_room = room_for(prompt.target)
    assert chunk_tokens(prompt, cost, policy, contended=True, memory=memory) == usual
