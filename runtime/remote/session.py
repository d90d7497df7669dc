"""What the front process knows of one life of the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..errors import ActorDied, InvalidRequest, NotReady, Overloaded, TroupeError
from ..event_stream import EventStream
from ..events import Failed
from ..models.progress import Progress
from ..service import Readiness
from .link import FrameTooLarge, Link
from .to_engine import Call, Cancel, Close, Hello, Open, Stop
from .to_front import (
    Accepted,
    Answer,
    Events,
    Loaded,
    LoadFailed,
    Loading,
    Pulse,
    Refused,
    ToFront,
    Welcome,
    Words,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..generation import Generation, ModelInfo
    from ..models.progress import Report
    from .words import KnownWords

Value = TypeVar("Value")

FROM_ENGINE: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)

MOST_UNSENT_BYTES = 64 << 20
"""An engine process that does not read gets no more requests."""


class RemoteStream:
    """One request at the engine process.

    Attributes:
        accepted: done once it is, or failed with why not.
        events: its mailbox here.
    """

    def __init__(self, choices: int, bound: int) -> None:
        self.accepted: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        self.events = EventStream(choices=choices, bound=bound)
        self._open = set(range(choices))

    def hear(self, events: list[Any], ended: tuple[int, ...]) -> None:
        """Take in new events."""
        if ended:
            self._open.difference_update(ended)
        if events:
            self.events.push_all(events)

    def fail(self, error: TroupeError) -> None:
        """Nothing more comes: every choice that has not ended ends with this."""
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # whoever opened it may have left
            return
        retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
        for index in sorted(self._open):
            self.events.push(Failed(error.code, error.message, error.param, retry_after_s, index))
        self._open.clear()


class Session:
    """Owned by the event loop's thread.

    Args:
        words: learns the texts of tokens.
        progress: hears of downloads and conversions.
        event_buffer: bound of each stream's mailbox.

    Attributes:
        link: to the engine process.
        loaded: done once requests are served, or failed with why they never will be.
        over: set when the connection is gone.
        readiness: as last heard.
        info: what is served; None while it is not.
        pulses: how often the engine process was heard to live.
    """

    def __init__(self, words: KnownWords, progress: Report | None, event_buffer: int) -> None:
        loop = asyncio.get_running_loop()
        self.link: Link[ToFront] = Link(FROM_ENGINE, self._hear, self._lost)
        self.loaded: asyncio.Future[None] = loop.create_future()
        self.over = asyncio.Event()
        self.readiness = Readiness(ready=False, reason="loading")
        self.info: ModelInfo | None = None
        self.pulses = 0
        self._words = words
        self._progress = progress
        self._event_buffer = event_buffer
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._streams: dict[int, RemoteStream] = {}
        self._ending: TroupeError | None = None

    def greet(self, hello: Hello) -> None:
        """Have the engine process load."""
        self.link.send(hello)

    # --- calls ----------------------------------------------------------------------------------------------------

    async def call(self, make: Callable[[int], Call], kind: type[Value], timeout_s: float | None = None) -> Value:
        """The answer to a call. Raises what the engine process answers; ActorDied when it ends first; TimeoutError."""
        number = next(self._numbers)
        self._send(make(number))
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                raw = await answer
        except BaseException:
            if not answer.done() or answer.cancelled():
                self.link.send(Close(number))
            raise
        finally:
            del self._calls[number]
        return msgspec.msgpack.decode(raw, type=kind)

    def open(self, generation: Generation, *, whole: bool) -> tuple[int, RemoteStream]:
        """Submit a request; `close` it in any case. Raises InvalidRequest for one that cannot be sent, Overloaded."""
        number = next(self._numbers)
        self._send(Open(number, generation, whole), _part_of(generation))
        stream = self._streams[number] = RemoteStream(max(1, generation.n), self._event_buffer)
        return number, stream

    def close(self, number: int) -> None:
        """Listen to a request no more; what it still does is cancelled."""
        stream = self._streams.pop(number)
        if not stream.events.exhausted and not self.over.is_set():
            self.link.send(Close(number))

    def cancel(self, request_id: str) -> None:
        """See `Service.cancel`."""
        with contextlib.suppress(UnicodeEncodeError):  # no id of a request
            self.link.send(Cancel(request_id))

    def stop(self, error: TroupeError) -> None:
        """Have the engine process end everything; what it does not end itself ends with `error`."""
        self._ending = error
        self.link.send(Stop())

    def _send(self, message: Call, param: str = "prompt") -> None:
        if self.over.is_set():
            raise NotReady("the engine process has ended; try again later")
        if self.link.unsent_bytes > MOST_UNSENT_BYTES:
            raise Overloaded("the engine process does not keep up; try again later")
        try:
            self.link.send(message)
        except UnicodeEncodeError:
            raise InvalidRequest("the text holds half of a surrogate pair", param=param) from None
        except (FrameTooLarge, TypeError, OverflowError, RecursionError) as error:
            raise InvalidRequest(f"the request cannot be sent to the engine: {error}", param=param) from None

    # --- called by the link ---------------------------------------------------------------------------------------

    def _hear(self, message: ToFront) -> None:
        match message:
            case Events(streams=streams):
                for found in streams:
                    stream = self._streams.get(found.number)
                    if stream is not None:
                        stream.hear(found.events, found.ended)
            case Words(words=words, model=model):
                self._words.learn(model, words)
            case Accepted(number=number) if number in self._streams:
                _settle(self._streams[number].accepted, message)
            case Answer(number=number, value=value) if number in self._calls:
                _settle(self._calls[number], value)
            case Refused(number=number, failure=failure):
                self._refused(number, failure.error())
            case Accepted() | Answer():
                pass  # nobody waits any more
            case _:
                self.pulses += 1
                self._hear_of_life(message)

    def _hear_of_life(self, message: Welcome | Loading | Loaded | LoadFailed | Pulse) -> None:
        match message:
            case Pulse(readiness=readiness, info=info):
                self.readiness, self.info = readiness, info
            case Loaded():
                _settle(self.loaded, None)
            case LoadFailed(failure=failure):
                self._end(failure.error())
            case Loading(stage=stage, done=done, total=total, unit=unit):
                if self._progress is not None:
                    self._progress(Progress(stage, done, total, unit))
            case Welcome():
                pass

    def _refused(self, number: int, error: TroupeError) -> None:
        if number in self._streams:
            self._streams[number].fail(error)
        elif number in self._calls and not self._calls[number].done():
            self._calls[number].set_exception(error)

    def _lost(self, reason: str) -> None:
        self.over.set()
        if not self.loaded.done():
            self._ending = ActorDied(f"the engine process ended while it loaded ({reason})")
        self._end(self._ending or ActorDied("the engine process ended; it is being started anew, try again"))

    def _end(self, error: TroupeError) -> None:
        """Everything that is under way fails."""
        if not self.loaded.done():
            self.loaded.set_exception(error)
            self.loaded.exception()
        self.readiness = Readiness(ready=False, reason="restarting", detail=error.message)
        self.info = None
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        for stream in self._streams.values():
            stream.fail(error)


def _settle(future: asyncio.Future[Value], value: Value) -> None:
    if not future.done():
        future.set_result(value)


def _part_of(generation: Generation) -> str:
    return "messages" if generation.messages is not None else "prompt"
