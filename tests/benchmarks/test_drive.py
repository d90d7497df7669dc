"""The load generator in virtual time: closed and open loops, coordinated omission, turns, ends."""

from __future__ import annotations

import pytest

from benchmarks.measure import BenchPlan, measure
from benchmarks.traffic.arrivals import Bursts, Constant, Level, Replay
from benchmarks.traffic.conversations import Workload
from benchmarks.traffic.drive import DriveSettings

from .virtual_time import ScriptedTarget, run


def load(target, level, workload=None, **settings):
    plan = BenchPlan(
        levels=(level,), workload=workload or Workload(), drive=DriveSettings(**settings), scrape_s=0, warm_up=0
    )
    return run(measure(target, plan, level, 0))


def test_closed_loop_keeps_its_users_busy():
    target = ScriptedTarget(lambda number: 1.0)
    found = load(target, Level("4", users=4), conversations=12)
    assert target.most_open == 4
    assert found.figures.requests == 12
    assert found.figures.wall_s == pytest.approx(3.0)
    assert found.figures.ttft_ms["max"] == pytest.approx(1000)


def test_open_loop_does_not_wait_for_answers():
    target = ScriptedTarget(lambda number: 100.0)
    load(target, Level("10/s", schedule=Constant(10.0)), conversations=50)
    assert target.most_open == 50
    sent = [at_s - target.asked_s[0] for at_s in target.asked_s]
    assert sent == pytest.approx([number / 10 for number in range(50)])


def test_a_stall_is_charged_to_all_who_came_meanwhile():
    """Coordinated omission: a server that stops for 5 s at 10 requests a second owes about 50 of them a wait."""
    target = ScriptedTarget(lambda number: 5.0 if number == 10 else 0.001, serial=True)
    found = load(target, Level("10/s", schedule=Constant(10.0)), conversations=200)
    waits = [outcome.first_token_s for outcome in found.outcomes]
    assert sum(wait > 0.5 for wait in waits) == pytest.approx(45, abs=3)
    assert waits[11] == pytest.approx(4.9, abs=0.02)
    assert waits[35] == pytest.approx(2.5, abs=0.05)
    # A closed loop of one user meets the same server and sees one slow request.
    alone = ScriptedTarget(lambda number: 5.0 if number == 10 else 0.001, serial=True)
    blind = load(alone, Level("1", users=1), conversations=200)
    assert sum(outcome.first_token_s > 0.5 for outcome in blind.outcomes) == 1


def test_a_client_that_is_held_back_does_not_stop_the_clock():
    target = ScriptedTarget(lambda number: 1.0)
    found = load(target, Level("burst", schedule=Bursts(10, 100.0)), conversations=10, max_open=1)
    assert target.most_open == 1
    waits = [outcome.first_token_s for outcome in found.outcomes]
    assert sorted(waits) == pytest.approx(list(range(1, 11)))
    assert found.figures.send_lag_ms["max"] == pytest.approx(9000)


def test_a_replay_ends_by_itself():
    target = ScriptedTarget(lambda number: 0.5)
    found = load(target, Level("replay", schedule=Replay((0.0, 2.0, 2.5), 2.0)))
    assert [outcome.intended_s for outcome in found.outcomes] == pytest.approx([0.0, 1.0, 1.25])


@pytest.mark.parametrize("level", [Level("2", users=2), Level("c", schedule=Constant(2.0))])
def test_duration_stops_starting(level):
    target = ScriptedTarget(lambda number: 1.0)
    found = load(target, level, duration_s=5.0)
    assert found.figures.requests == 10
    assert max(outcome.intended_s for outcome in found.outcomes) < 5.0


def test_turns_carry_the_conversation_and_wait():
    target = ScriptedTarget(lambda number: 1.0, text="I see.")
    found = load(target, Level("1", users=1), Workload(turns=3), conversations=1, think_s=4.0)
    roles = [[message["role"] for message in ask.messages] for ask in target.asks]
    assert roles == [["user"], ["user", "assistant", "user"], ["user", "assistant", "user", "assistant", "user"]]
    assert target.asks[2].messages[1]["content"] == "I see."
    assert target.asks[2].messages[:3] == target.asks[1].messages
    assert [outcome.intended_s for outcome in found.outcomes] == pytest.approx([0.0, 5.0, 10.0])
    assert [outcome.first_token_s for outcome in found.outcomes] == pytest.approx([1.0, 1.0, 1.0])


def test_warm_up_is_sent_and_not_counted():
    target = ScriptedTarget(lambda number: 1.0)
    plan = BenchPlan(levels=(Level("8", users=8),), warm_up=3, scrape_s=0, drive=DriveSettings(conversations=5))
    warm = run(measure(target, plan, plan.levels[0], -1))
    assert (len(target.asks), warm.repeat, target.most_open) == (3, -1, 3)


def test_old_answers_are_decoded_when_too_many_bytes_wait(monkeypatch):
    from benchmarks.traffic import drive

    class Held:
        left = False

        def __init__(self):
            self.held_bytes, self.decoded = 40, 0

        def record(self):
            self.held_bytes, self.decoded = 0, self.decoded + 1

    monkeypatch.setattr(drive, "HELD_BYTES", 100)
    tally = drive.Tally()
    answers = [Held() for _ in range(5)]
    for answer in answers:
        tally.add(drive.Entry(answer, 0.0, 0.0, 0, 0, 1))
    assert [answer.decoded for answer in answers] == [1, 1, 1, 0, 0]


def test_a_server_that_is_gone_is_named():
    class Gone(ScriptedTarget):
        async def prepare(self, connections: int) -> None:
            raise ConnectionRefusedError("refused")

    with pytest.raises(RuntimeError, match="scripted cannot be reached: refused"):
        load(Gone(lambda number: 1.0), Level("1", users=1))


def test_arrivals_faster_than_anybody_starts_do_not_pile_up():
    """A rate that no client can send is bounded by `max_open`, and requests run while others are still to come."""
    target = ScriptedTarget(lambda number: 0.001)
    found = load(target, Level("1e9/s", schedule=Constant(1e9)), conversations=2000, max_open=50)
    assert target.most_open == 50
    assert found.figures.requests == 2000
    assert found.figures.send_lag_ms["max"] == pytest.approx(39, abs=2)
