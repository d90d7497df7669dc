"""Prefill's core: a prompt from its admission to its rows being ready."""

from __future__ import annotations

import pytest

from mlx_troupe.runtime.events import PrefillProgress
from mlx_troupe.runtime.messages.admission import RowDone
from mlx_troupe.runtime.messages.cache_store import Match, PagesLost, Store, Unlease
from mlx_troupe.runtime.messages.decode import Offer, Ready, Withdraw
from mlx_troupe.runtime.messages.prefill import Matched
from mlx_troupe.runtime.request import State
from tests.actors.desk import PAGE, Desk
from tests.actors.parts import make_row, make_rows, waiting_events


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
    assert chunk.stash == ()
    desk.ran(chunk)
    assert desk.core.to_cache == []


def test_pages_completed_by_a_chunk_are_stashed_and_stored(desk: Desk) -> None:
    row = make_row(range(100, 123))
    desk.admit(row)
    desk.answer(row.row)
    stored = []
    for stash in [(4, 8), (12, 16), (20, 22)]:
        (chunk,) = desk.chunks()
        assert chunk.stash == stash
        desk.ran(chunk)
        stored += [message for message in desk.core.to_cache if isinstance(message, Store)]
        desk.core.to_cache.clear()
    assert [store.ends for store in stored] == [(4, 8), (12, 16), (20, 22)]
    assert all(list(store.tokens) == row.prompt[: store.ends[-1]] for store in stored)


def test_a_match_is_restored_by_the_first_chunk(desk: Desk) -> None:
    row = make_row(range(100, 120))
    desk.admit(row)
    desk.answer(row.row, (11, 12, 13), 10)
    assert (row.cached, row.computed) == (10, 10)
    (chunk,) = desk.chunks()
    assert (chunk.start, chunk.restore_pages, chunk.restore_tokens) == (10, (11, 12, 13), 10)
    assert chunk.stash == (12, 16)
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


def test_at_the_cap_of_stores_new_prompts_wait_and_begun_ones_go_on(desk: Desk) -> None:
    begun, new = make_row(range(100, 120)), make_row(range(200, 220))
    desk.admit(begun)
    desk.answer(begun.row)
    desk.ran(*desk.chunks())
    desk.core.stores(full=True)
    desk.admit(new)
    desk.answer(new.row)
    for _ in range(2):
        (chunk,) = desk.chunks()
        assert chunk.row == begun.row
        desk.ran(chunk)
    assert desk.said(Ready) == [Ready((begun,))]
    assert desk.said(Offer) == [Offer((), 0.0)], "the new one waits"
    desk.core.stores(full=False)
    desk.core.settle()
    desk.answer(new.row)
    assert [chunk.row for chunk in desk.chunks()] == [new.row]


def test_a_restoring_prompt_does_not_hold_the_others_up(desk: Desk) -> None:
    waiting, other = make_row(range(100, 120)), make_row(range(200, 220))
    desk.admit(waiting)
    desk.core.restoring(waiting.row)
    assert waiting.state is State.RESTORING
    desk.admit(other)
    desk.answer(other.row)
    (chunk,) = desk.chunks()
    assert chunk.row == other.row
    desk.core.matched(Matched(waiting.row, (1, 2), 8))
    assert (waiting.state, waiting.cached) == (State.PREFILLING, 8)


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
