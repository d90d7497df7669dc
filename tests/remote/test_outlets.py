"""What leaves the engine process, and when."""

from __future__ import annotations

import msgspec
import pytest

from mlx_troupe.runtime.events import (
    Failed,
    Finished,
    PositionLogprobs,
    PrefillProgress,
    PromptLogprobs,
    TextDelta,
    TokenLogprob,
    Usage,
)
from mlx_troupe.runtime.remote.link import HEADER_BYTES
from mlx_troupe.runtime.remote.outlets import Outbox, Outlet, WordsSent
from mlx_troupe.runtime.remote.to_front import Events, StreamEvents, ToFront, Words


class Desk:
    """An outbox whose turns the test takes."""

    def __init__(self, limit_bytes: int = 1 << 20) -> None:
        self.scheduled = 0
        self.ended: list[int] = []
        self.broken: list[int] = []
        self.alarms = 0
        self.outbox = Outbox(
            self.schedule, ended=self.ended.append, broken=self.break_off, failed=self.alarm, limit_bytes=limit_bytes
        )

    def schedule(self) -> None:
        self.scheduled += 1

    def break_off(self, number: int, error: Exception) -> None:
        self.broken.append(number)

    def alarm(self) -> None:
        self.alarms += 1

    def open(self, number: int, **options) -> Outlet:
        outlet = Outlet(number, self.outbox, **({"choices": 1, "bound": 4} | options))
        outlet.start(None)
        return outlet

    def turn(self) -> list[ToFront]:
        return [msgspec.msgpack.decode(frame[HEADER_BYTES:], type=ToFront) for frame in self.outbox.gather()]


def text(word: str, index: int = 0) -> TextDelta:
    return TextDelta(word, (7,), None, index)


END = Finished("stop", Usage())


def test_one_frame_a_turn_whatever_the_streams() -> None:
    desk = Desk()
    outlets = [desk.open(number) for number in range(64)]
    for outlet in outlets:
        outlet.push(text("a"))
        outlet.push(text("b"))
    (frame,) = desk.turn()
    assert isinstance(frame, Events)
    assert [stream.number for stream in frame.streams] == list(range(64))
    assert frame.streams[5] == StreamEvents(5, [text("a"), text("b")])
    assert desk.turn() == []


def test_nothing_leaves_before_the_request_is_accepted() -> None:
    desk = Desk()
    outlet = Outlet(1, desk.outbox, choices=1, bound=4)
    outlet.push(text("early"))
    assert desk.turn() == []
    outlet.start(None)
    assert desk.turn() == [Events([StreamEvents(1, [text("early")])])]


def test_a_whole_answer_leaves_at_its_end_without_progress() -> None:
    desk = Desk()
    outlet = desk.open(1, choices=2, whole=True)
    outlet.push(PrefillProgress(1, 2))
    for word in "abcdefgh":
        outlet.push(text(word))
    outlet.push(END)
    assert desk.turn() == []
    outlet.push(msgspec.structs.replace(END, index=1))
    (frame,) = desk.turn()
    assert frame.streams[0].events[:8] == [text(word) for word in "abcdefgh"]
    assert frame.streams[0].ended == (0, 1)
    assert desk.ended == [1]


def test_a_front_that_does_not_read_grows_nothing() -> None:
    desk = Desk()
    outlet = desk.open(1, choices=2)
    for number in range(1000):
        outlet.push(PrefillProgress(number, 1000))
        outlet.push(text("x"))
        outlet.push(text("y", 1))
    assert len(outlet._events) <= 4
    outlet.push(END)
    outlet.push(msgspec.structs.replace(END, index=1))
    (frame,) = desk.turn()
    events = frame.streams[0].events
    for index, letter in enumerate("xy"):
        found = [event for event in events if isinstance(event, TextDelta) and event.index == index]
        assert "".join(event.text for event in found) == letter * 1000
        assert sum(len(event.tokens) for event in found) == 1000
    assert frame.streams[0].ended == (0, 1)


@pytest.mark.parametrize("harm", ["\ud800", "x" * (1 << 21)])
def test_a_stream_that_cannot_be_sent_fails_alone(harm) -> None:
    desk = Desk()
    outlets = [desk.open(number) for number in range(7)]
    for outlet in outlets:
        outlet.push(text(harm if outlet.number == 3 else "fine"))
    sent = [stream.number for frame in desk.turn() for stream in frame.streams]
    assert sent == [0, 1, 2, 4, 5, 6]
    assert desk.broken == [3]


def test_a_splitter_that_raises_fails_its_stream_alone() -> None:
    class Broken:
        def split(self, events: object) -> None:
            raise ValueError("no")

    desk = Desk()
    faulty = Outlet(1, desk.outbox, choices=1, bound=4)
    faulty.start(Broken())
    fine = desk.open(2)
    faulty.push(text("a"))
    fine.push(text("b"))
    assert desk.turn() == [Events([StreamEvents(2, [text("b")])])]
    assert desk.broken == [1]


def test_readiness_is_told_before_a_failure_leaves() -> None:
    desk = Desk()
    outlet = desk.open(1)
    outlet.push(text("a"))
    desk.turn()
    assert desk.alarms == 0
    outlet.push(Failed("actor_died", "gone"))
    desk.turn()
    assert desk.alarms == 1


def test_each_word_is_sent_once_and_before_the_event_that_names_it() -> None:
    desk = Desk()
    words = WordsSent(lambda token: (f"<{token}>", b"%d" % token))
    outlets = [desk.open(number, words=words) for number in (1, 2)]

    def position(*tokens: int) -> tuple[PositionLogprobs, ...]:
        return (PositionLogprobs(TokenLogprob(tokens[0], -1.0), tuple(TokenLogprob(t, -1.0) for t in tokens)),)

    for outlet in outlets:
        outlet.push(TextDelta("a", (5,), position(5, 6), 0))
    first, events = desk.turn()
    assert isinstance(first, Words)
    assert sorted(first.words) == [(5, "<5>", b"5"), (6, "<6>", b"6")]
    assert isinstance(events, Events)
    outlets[0].push(PromptLogprobs((5, 9), position(6, 8)))
    more, _ = desk.turn()
    assert sorted(more.words) == [(8, "<8>", b"8"), (9, "<9>", b"9")]
    outlets[1].push(TextDelta("a", (9,), position(9, 8), 0))
    assert [type(frame) for frame in desk.turn()] == [Events]


def test_nobody_is_told_what_comes_after_a_stop() -> None:
    desk = Desk()
    outlet = desk.open(1)
    outlet.stop()
    outlet.push(END)
    assert desk.turn() == []
