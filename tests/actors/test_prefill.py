"""Prefill's core: the life of a prompt, message by message."""

from __future__ import annotations

import pytest

from mlx_troupe.actors.prefill_core import PrefillCore
from mlx_troupe.actors.prefill_cost import ChunkCost
from mlx_troupe.actors.prefill_policy import PrefillPolicy
from mlx_troupe.runtime.clock import ManualClock
from mlx_troupe.runtime.errors import EngineFailed
from mlx_troupe.runtime.events import PrefillProgress
from mlx_troupe.runtime.messages.admission import RowDone
from mlx_troupe.runtime.messages.cache_store import Match, PagesLost, Store, Unlease
from mlx_troupe.runtime.messages.decode import CancelRunning, Offer, Ready, Withdraw
from mlx_troupe.runtime.messages.executor import Chunk
from mlx_troupe.runtime.messages.prefill import ChunkDone, ChunksDone, Matched
from mlx_troupe.runtime.request import Request, State
from tests.actors.parts import endings, make_row, make_rows, waiting_events

PAGE = 4


class Desk:
    """A prefill core, and shorthands for what its neighbours say."""

    def __init__(self, *, page_tokens: int = PAGE, chunk_tokens: int = 8, token_s: float = 1e-3) -> None:
        self.clock = ManualClock()
        policy = PrefillPolicy(chunk_tokens=chunk_tokens)
        self.core = PrefillCore(policy, ChunkCost(token_s), page_tokens=page_tokens, clock=self.clock)

    def admit(self, *rows: Request) -> None:
        for row in rows:
            row.move(State.ADMITTED)
        self.core.admit(rows)
        self.core.settle()

    def answer(self, row: int, pages: tuple[int, ...] = (), tokens: int = 0) -> None:
        """The cache-store's answer to the Match that must be waiting."""
        assert any(isinstance(message, Match) and message.row == row for message in self.core.to_cache)
        self.core.to_cache.clear()
        self.core.matched(Matched(row, pages, tokens))
        self.core.settle()

    def said(self, kind: type) -> list:  # noqa: ANN401
        """Take the messages of one kind to decode."""
        found = [message for message in self.core.to_decode if isinstance(message, kind)]
        self.core.to_decode[:] = [message for message in self.core.to_decode if not isinstance(message, kind)]
        return found

    def chunks(self) -> list[Chunk]:
        """The one offer that must be waiting."""
        (offer,) = self.said(Offer)
        return list(offer.chunks)

    def ran(self, *chunks: Chunk, seconds: float = 0.01, decoding: int = 0, **fault) -> None:  # noqa: ANN003
        """These chunks have run."""
        tokens = 0 if fault else None
        done = tuple(
            ChunkDone(
                chunk.row, len(chunk.tokens) if tokens is None else 0, chunk.start, seconds, **fault
            )
            for chunk in chunks
        )
        self.core.done(ChunksDone(done, decoding))
        self.core.settle()


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_prompt_is_computed_up_to_its_last_token_but_one(desk: Desk) -> None:
    row = make_row(range(100, 122))
    desk.admit(row)
    assert row.state is State.RESTORING
    desk.answer(row.row)
    assert row.state is State.PREFILLING
    starts = []
    while not desk.said(Ready):
        (chunk,) = desk.chunks()
        assert list(chunk.tokens) == row.prompt[chunk.start : chunk.start + len(chunk.tokens)]
        starts.append((chunk.start, len(chunk.tokens)))
        desk.ran(chunk)
    assert starts == [(0, 8), (8, 8), (16, 5)]
    assert row.computed == row.prefill_target == 21
    assert desk.core.idle
    assert [e for e in waiting_events(row) if isinstance(e, PrefillProgress)] == [
        PrefillProgress(8, 22),
        PrefillProgress(16, 22),
        PrefillProgress(22, 22),
    ]


def test_every_report_is_answered_by_one_offer_after_the_ready_rows(desk: Desk) -> None:
    row = make_row(range(5))
    desk.admit(row)
    desk.answer(row.row)
    (chunk,) = desk.chunks()
    desk.ran(chunk)
    assert [type(message) for message in desk.core.to_decode] == [Ready, Offer]
    assert desk.core.to_decode[1] == Offer((), 0.0)
    desk.core.to_decode.clear()
    desk.core.settle()
    assert desk.core.to_decode == []


def test_a_one_token_prompt_is_ready_at_once(desk: Desk) -> None:
    row = make_row([7])
    desk.admit(row)
    assert desk.said(Ready) == [Ready((row,))]
    assert desk.core.to_cache == []


@pytest.mark.parametrize(("cache", "page_tokens"), [(False, PAGE), (True, 0)])
def test_without_a_cache_nothing_is_matched_or_stashed(cache: bool, page_tokens: int) -> None:
    desk = Desk(page_tokens=page_tokens)
    row = make_row(range(9), cache=cache)
    desk.admit(row)
    assert row.state is State.PREFILLING
    (chunk,) = desk.chunks()
    assert chunk.stash_pages == ()
    desk.ran(chunk)
    assert desk.core.to_cache == []


def test_pages_completed_by_a_chunk_are_stashed_and_stored(desk: Desk) -> None:
    row = make_row(range(100, 123))
    desk.admit(row)
    desk.answer(row.row)
    stored = []
    for stash in [(0, 1), (2, 3), (4,)]:
        (chunk,) = desk.chunks()
        assert chunk.stash_pages == stash
        desk.ran(chunk)
        stored += [message for message in desk.core.to_cache if isinstance(message, Store)]
        desk.core.to_cache.clear()
    assert [(store.first_page, store.last_page) for store in stored] == [(0, 2), (2, 4), (4, 5)]
    assert all(list(store.tokens) == row.prompt[: store.last_page * PAGE] for store in stored)


def test_a_match_is_restored_by_the_first_chunk(desk: Desk) -> None:
    row = make_row(range(100, 120))
    desk.admit(row)
    desk.answer(row.row, (11, 12, 13), 10)
    assert (row.cached, row.computed) == (10, 10)
    (chunk,) = desk.chunks()
    assert (chunk.start, chunk.restore_pages, chunk.restore_tokens) == (10, (11, 12, 13), 10)
    assert chunk.stash_pages == (2, 3)
    desk.ran(chunk)
    assert Unlease(row.row) in desk.core.to_cache
    (rest,) = desk.chunks()
    assert (rest.start, rest.restore_pages, rest.restore_tokens) == (18, (), 0)


def test_a_whole_match_still_needs_a_chunk_to_restore_it(desk: Desk) -> None:
    row = make_row(range(100, 109))
    desk.admit(row)
    desk.answer(row.row, (11, 12), 8)
    (chunk,) = desk.chunks()
    assert (chunk.tokens, chunk.start, chunk.restore_tokens) == ((), 8, 8)
    desk.ran(chunk)
    assert desk.said(Ready) == [Ready((row,))]


def test_a_missed_restore_starts_over_and_forgets_the_pages(desk: Desk) -> None:
    row = make_row(range(100, 109))
    desk.admit(row)
    desk.answer(row.row, (11,), 4)
    (chunk,) = desk.chunks()
    desk.ran(chunk, restore_missed=True)
    assert desk.core.to_cache == [Unlease(row.row), PagesLost((11,))]
    (again,) = desk.chunks()
    assert (again.start, again.restore_pages, row.cached) == (0, (), 0)
    desk.ran(again)
    assert desk.said(Ready) == [Ready((row,))]


def test_a_failed_chunk_fails_its_rows_only(desk: Desk) -> None:
    bad, good = make_rows(range(100, 109), n=2), make_row(range(200, 209))
    desk.admit(*bad)
    desk.answer(bad[0].row)
    chunks = desk.chunks()
    desk.admit(good)
    desk.answer(good.row)
    desk.ran(*chunks, error="out of memory")
    for row in bad:
        assert row.finish_reason == "error:engine_failed"
    assert desk.said(Withdraw) == [Withdraw((bad[0].row,))]
    assert [m.row for m in desk.core.to_admission if isinstance(m, RowDone)] == [row.row for row in bad]
    assert desk.chunks()[0].row == good.row


def test_prompts_are_matched_again_when_pages_were_stored_meanwhile(desk: Desk) -> None:
    first, second = make_row(range(100, 109)), make_row([*range(100, 109), 1])
    desk.admit(first)
    desk.answer(first.row)
    chunks = desk.chunks()
    desk.admit(second)
    desk.answer(second.row)
    desk.ran(*chunks)
    assert [type(message) for message in desk.core.to_cache] == [Store, Match]
    desk.said(Ready)
    assert desk.said(Offer) == [Offer((), 0.0)]
    desk.answer(second.row, (1, 2), 8)
    (chunk,) = desk.chunks()
    assert (chunk.start, chunk.restore_pages) == (8, (1, 2))


# --- fairness -------------------------------------------------------------------------------------------------------


def test_running_rows_are_owed_a_share_of_the_last_chunk() -> None:
    desk = Desk(page_tokens=0, token_s=0.1)
    desk.core.load(3)
    row = make_row(range(100))
    desk.admit(row)
    (offer,) = desk.said(Offer)
    assert offer.after_decode_s == 0.0
    desk.ran(*offer.chunks, seconds=0.4, decoding=3)
    (offer,) = desk.said(Offer)
    assert offer.after_decode_s == pytest.approx(0.12)
    desk.core.load(0)
    desk.ran(*offer.chunks, seconds=0.4, decoding=0)
    (offer,) = desk.said(Offer)
    assert offer.after_decode_s == 0.0


def test_a_prompt_that_becomes_ready_counts_as_decoding() -> None:
    desk = Desk(page_tokens=0, token_s=0.1, chunk_tokens=2048)
    short, long = make_row(range(3)), make_row(range(4000))
    desk.admit(short)
    (offer,) = desk.said(Offer)
    desk.admit(long)
    desk.ran(*offer.chunks, seconds=0.2)
    (offer,) = desk.said(Offer)
    assert len(offer.chunks[0].tokens) == 16
    assert offer.after_decode_s == pytest.approx(0.06)


def test_a_short_prompt_may_overtake_a_long_chunk_that_is_not_planned() -> None:
    desk = Desk(page_tokens=0, chunk_tokens=2048)
    desk.core.load(1)
    long, short, other = make_row(range(5000)), make_row(range(10)), make_row(range(11))
    desk.admit(long)
    (waiting,) = desk.chunks()
    desk.admit(short)
    (overtaking,) = desk.chunks()
    assert overtaking.row == short.row
    desk.admit(other)
    assert desk.core.to_decode == [], "one overtakes, the next waits for its turn"
    desk.ran(waiting, dropped=True)
    assert desk.said(Offer) == [Offer((), 0.0)]
    desk.ran(overtaking, seconds=0.01, decoding=1)
    assert [chunk.row for chunk in desk.chunks()] == [other.row]


def test_nobody_overtakes_a_short_chunk() -> None:
    desk = Desk(page_tokens=0)
    first, second = make_row(range(9)), make_row(range(9))
    desk.admit(first)
    desk.said(Offer)
    desk.admit(second)
    assert desk.core.to_decode == []


# --- ends -----------------------------------------------------------------------------------------------------------


def states(desk: Desk, row: Request, where: str) -> None:
    """Bring a row to a state of its life in prefill."""
    desk.admit(row)
    if where == "restoring":
        return
    desk.answer(row.row, (11,), 4)
    if where == "offered":
        return
    (chunk,) = desk.chunks()
    desk.ran(chunk)
    assert where == "prefilling"


@pytest.mark.parametrize("where", ["restoring", "offered", "prefilling"])
@pytest.mark.parametrize("how", ["cancelled", "timeout", "deadline"])
def test_ends_in_every_state(desk: Desk, where: str, how: str) -> None:
    row = make_row(range(100, 130), deadline_s=5.0)
    states(desk, row, where)
    if how == "deadline":
        desk.core.expire()
        assert not row.finished
        desk.clock.advance(5.0)
        desk.core.expire()
    else:
        desk.core.cancel([row.row], timeout=how == "timeout")
    desk.core.settle()
    assert row.finish_reason == ("cancelled" if how == "cancelled" else "timeout")
    assert len(endings(row)) == 1
    assert desk.said(Withdraw) == [Withdraw((row.row,))]
    assert desk.core.to_admission == [RowDone(row.row)]


def test_a_late_match_of_a_cancelled_row_is_unleased(desk: Desk) -> None:
    row = make_row(range(100, 110))
    desk.admit(row)
    desk.core.cancel([row.row])
    desk.core.matched(Matched(row.row, (11,), 4))
    assert desk.core.to_cache[-1] == Unlease(row.row)
    assert desk.core.idle


@pytest.mark.parametrize("ran", [True, False])
def test_pages_of_a_cancelled_row_are_leased_until_its_chunk_is_over(desk: Desk, ran: bool) -> None:
    row = make_row(range(100, 130))
    states(desk, row, "offered")
    (chunk,) = desk.chunks()
    desk.core.cancel([row.row])
    assert Unlease(row.row) not in desk.core.to_cache
    if ran:
        desk.ran(chunk)
    else:
        desk.ran(chunk, dropped=True)
    assert desk.core.to_cache.count(Unlease(row.row)) == 1
    assert any(isinstance(message, Store) for message in desk.core.to_cache) == ran, "its pages are still good"
    assert desk.core.idle


def test_rows_that_are_not_here_are_passed_on(desk: Desk) -> None:
    row = make_row(range(100, 110))
    desk.admit(row)
    desk.core.cancel([row.row, 5, 3], timeout=True)
    assert desk.said(CancelRunning) == [CancelRunning((3, 5), timeout=True)]
    assert row.finish_reason == "timeout"


def test_the_leader_may_end_before_the_other_choices(desk: Desk) -> None:
    rows = make_rows(range(100, 106), n=3)
    desk.admit(*rows)
    desk.core.cancel([rows[0].row])
    desk.answer(rows[0].row)
    (chunk,) = desk.chunks()
    assert chunk.row == rows[0].row
    desk.ran(chunk)
    assert desk.said(Ready) == [Ready(rows[1:])]


def test_fail_all_ends_everybody(desk: Desk) -> None:
    rows = [make_row(range(100 + index, 110)) for index in range(3)]
    for row in rows:
        desk.admit(row)
    desk.core.fail_all(EngineFailed("gone"))
    assert [row.finish_reason for row in rows] == ["error:engine_failed"] * 3
    assert desk.core.idle
