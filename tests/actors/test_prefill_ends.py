"""Prefill's core: debts, overtaking, and ends in every state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mlx_troupe.runtime.errors import EngineFailed
from mlx_troupe.runtime.messages.admission import RowDone
from mlx_troupe.runtime.messages.cache_store import Store, Unlease
from mlx_troupe.runtime.messages.decode import CancelRunning, Offer, Ready, Withdraw
from mlx_troupe.runtime.messages.prefill import Matched
from tests.actors.parts import endings, make_row, make_rows

if TYPE_CHECKING:
    from mlx_troupe.runtime.request import Request

from tests.actors.desk import Desk


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
