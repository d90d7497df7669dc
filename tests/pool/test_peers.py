"""The board of a process's engines: claims, turns and debts. Pure; the clock is a number."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_troupe.runtime.peers import TURN_S, Peers, SharedLimit

SHARE = 0.5


def engines(count: int):
    board = Peers()
    return board, [board.join(f"model {place}") for place in range(count)]


def test_a_lone_engine_meets_no_rule():
    _, (one, idle) = engines(2)
    one.decoding = 4
    now_s = 0.0
    for _ in range(20):
        assert not one.others_decode
        assert one.take_turn(now_s)
        now_s += 0.5
        one.end_turn(0.5, SHARE, now_s)
        assert one.wait_s(now_s) is None
    assert idle.others_decode


def test_nobody_waits_while_nobody_decodes():
    _, (one, two) = engines(2)
    assert one.take_turn(0.0)
    assert two.take_turn(0.0)
    assert one.take_turn(0.0)


def test_one_chunk_at_a_time_and_decode_gets_its_share():
    _, (decoder, one, two) = engines(3)
    woken = []
    one.wake, two.wake = (lambda: woken.append("one")), (lambda: woken.append("two"))
    decoder.decoding = 1
    assert one.take_turn(0.0)
    assert not two.take_turn(0.1)
    assert two.wait_s(0.1) == pytest.approx(TURN_S - 0.1)
    one.end_turn(0.4, SHARE, 0.4)
    assert woken == ["two"]
    assert not two.take_turn(0.4)
    assert two.wait_s(0.4) == pytest.approx(0.2)
    assert not one.take_turn(0.7), "who asked first goes first"
    assert two.take_turn(0.7)


def test_a_turn_ends_by_itself():
    _, (decoder, hung, two) = engines(3)
    decoder.decoding = 1
    assert hung.take_turn(0.0)
    assert not two.take_turn(TURN_S - 0.01)
    assert two.take_turn(TURN_S)


def test_all_go_on_when_the_last_row_has_ended():
    _, (decoder, one, two) = engines(3)
    woken = []
    two.wake = lambda: woken.append(two)
    decoder.decoding = 3
    assert one.take_turn(0.0)
    assert not two.take_turn(0.0)
    decoder.decoding = 0
    assert woken == [two]
    assert two.take_turn(0.0)


@pytest.mark.parametrize("how", ["rest", "leave", "give_up"])
def test_who_goes_away_stands_in_nobodys_way(how):
    _, (decoder, one, two, three) = engines(4)
    woken = []
    three.wake = lambda: woken.append(three)
    decoder.decoding = 1
    assert one.take_turn(0.0)
    assert not two.take_turn(0.0)
    assert not three.take_turn(0.0)
    one.end_turn(0.0, SHARE, 0.1)
    woken.clear()
    getattr(two, how)()
    assert three in woken
    assert three.take_turn(0.1)
    if how == "leave":
        assert not any(peer is two for peer in three._board.others(three))


def test_an_engine_pays_its_own_decode_with_its_own_steps_only():
    _, (one, two) = engines(2)
    one.decoding = 1
    assert one.take_turn(0.0)
    one.end_turn(1.0, SHARE, 1.0)
    assert one.take_turn(1.0), "no other engine is owed anything"
    one.end_turn(1.0, SHARE, 2.0)
    two.decoding = 1
    assert not one.take_turn(2.0)
    assert one.take_turn(2.5)


def test_claims_of_others_count():
    board, (one, two) = engines(2)
    one.line_bytes, one.overhead_bytes, one.claim_bytes = (lambda: 1000), 100, 300
    assert (one.others_bytes(), two.others_bytes()) == (0, 300)
    assert (one.others_loaded, two.others_loaded) == (False, True)
    assert board.spare_bytes(two) == 600
    two.line_bytes, two.claim_bytes = (lambda: 900), 200
    assert board.spare_bytes(two) == 500
    assert not one.may_get(10)
    two.rows = 1
    assert one.may_get(10)
    assert not one.undisturbed
    two.rest()
    assert one.undisturbed


def test_the_last_engine_restores_the_limit():
    shared, now = SharedLimit(), [7]

    def set_limit(size: int) -> int:
        now[0], old = size, now[0]
        return old

    one, two = object(), object()
    shared.hold(one, set_limit, 100)
    shared.hold(two, set_limit, 100)
    shared.hold(one, set_limit, 90)
    shared.let_go(one, set_limit)
    assert now == [90]
    shared.let_go(one, set_limit)
    assert now == [90]
    shared.let_go(two, set_limit)
    assert now == [7]
    shared.hold(two, set_limit, 50)
    shared.let_go(two, set_limit)
    assert now == [7]


def happen(peers, peer, what, running, now_s):
    """One thing happens to an engine; `running` has the engines whose contended chunk runs, and since when."""
    if what == "ask" and peer not in running:
        contended = any(one.decoding for one in peers)
        if peer.take_turn(now_s) and contended:
            assert not [one for one, since_s in running.items() if now_s - since_s < TURN_S]
            running[peer] = now_s
    elif what == "end" and peer in running:
        peer.end_turn(now_s - running.pop(peer), SHARE, now_s)
    elif what == "give up" and peer not in running:
        peer.give_up()
    elif what in ("decode", "stop"):
        peer.decoding = int(what == "decode")


@settings(max_examples=200, deadline=None)
@given(
    st.integers(2, 4),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["ask", "end", "decode", "stop", "give up"])), max_size=60),
)
def test_turns_exclude_each_other_and_nobody_starves(count, happenings):
    _, peers = engines(count)
    now_s, running = 0.0, {}
    for place, what in happenings:
        now_s += 0.05
        happen(peers, peers[place % count], what, running, now_s)
    for peer in list(running):
        peer.end_turn(0.1, SHARE, now_s)
    waiting = [peer for peer in peers if not peer.take_turn(now_s)]
    for _ in range(2 * count):  # each of those that wait has its turn, one after the other
        for peer in list(waiting):
            now_s += 5.0
            if peer.take_turn(now_s):
                waiting.remove(peer)
                peer.end_turn(0.1, SHARE, now_s)
    assert not waiting
