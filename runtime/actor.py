"""The actor base: one inbox, one owner of its state, one answer for everybody when it dies.

Invariants (each has a test of its name):
- `full_inbox_refuses`: `tell` never blocks; a full inbox raises InboxFull to the sender.
- `death_answers_everyone`: when an actor ends, every Reply in its inbox, in hand or held by it fails with ActorDied.
- `one_batch_one_turn`: messages that wait together are handled in order, then `settle` runs once.
All of it runs on the event loop's thread; other threads use `loop.call_soon_threadsafe(ref.tell, message)`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

from .clock import MonotonicClock
from .errors import ActorDied

if TYPE_CHECKING:
    from collections.abc import Generator

    from .clock import Clock
    from .tracing import Tracer

logger = logging.getLogger(__name__)

M = TypeVar("M")
R = TypeVar("R")


class InboxFull(RuntimeError):
    """An actor's bounded inbox has no place left."""


class Reply(Generic[R]):
    """Where an answer goes: set once by the receiver, awaited once by the asker."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[R] = asyncio.get_running_loop().create_future()

    def send(self, value: R) -> None:
        """Answer. Ignored when the asker has gone or an answer exists."""
        if not self._future.done():
            self._future.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Answer with an error. Ignored when the asker has gone or an answer exists."""
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # read once, so that an asker who left causes no warning

    def __await__(self) -> Generator[object, None, R]:
        return self._future.__await__()


class Ref(Generic[M]):
    """A typed address of an actor."""

    __slots__ = ("_actor",)

    def __init__(self, actor: Actor[M]) -> None:
        self._actor = actor

    @property
    def name(self) -> str:
        """The actor's name."""
        return self._actor.name

    def tell(self, message: M) -> None:
        """Put a message into the inbox, at once.

        Raises:
            InboxFull: the inbox is at its bound.
            ActorDied: the actor has ended.
        """
        self._actor.post(message)


class ActorStats:
    """Counters of one actor, read by the metrics."""

    __slots__ = ("busy_s", "handled", "turns")

    def __init__(self) -> None:
        self.handled = 0
        self.turns = 0
        self.busy_s = 0.0


class Actor(Generic[M]):
    """Base of all actors: subclass, write `handle` (exhaustive match) and maybe `settle`.

    Args:
        name: for logs and metrics.
        inbox: bound of the inbox, in messages.
        clock: measures handling time.

    Attributes:
        tracer: records every message that is handled; None records nothing.
    """

    tracer: Tracer | None = None

    def __init__(self, name: str, *, inbox: int, clock: Clock | None = None) -> None:
        self.name = name
        self.stats = ActorStats()
        self.clock: Clock = clock or MonotonicClock()
        self.ref: Ref[M] = Ref(self)
        self._send, self._receive = anyio.create_memory_object_stream[M](inbox)
        self._death: ActorDied | None = None
        self._in_hand: M | None = None

    def handle(self, message: M) -> None:
        """React to one message. An exception ends the actor."""
        raise NotImplementedError  # pragma: no cover - abstract

    def settle(self) -> None:
        """Run once after every batch of messages that waited together."""

    def on_death(self, error: ActorDied) -> None:
        """Answer everybody this actor owes an answer; called once, when it ends by an exception or is stopped."""

    @property
    def depth(self) -> int:
        """Messages waiting."""
        return self._receive.statistics().current_buffer_used

    def post(self, message: M) -> None:
        """See `Ref.tell`."""
        if self._death is not None:
            _fail_reply(message, self._death)
            raise self._death
        try:
            self._send.send_nowait(message)
        except anyio.WouldBlock:
            raise InboxFull(f"the inbox of {self.name} is full; raise RuntimeConfig.inbox") from None

    async def run(self) -> None:
        """Serve the inbox until cancelled. Raises what a handler raised, after everybody was answered."""
        try:
            while True:
                self._turn(await self._receive.receive())
        except BaseException as error:
            self._die(error)
            raise

    def _turn(self, message: M) -> None:
        began = self.clock.now()
        handled = 1
        handle = self.handle if self.tracer is None else self._handle_traced
        self._in_hand = message
        handle(message)
        while True:
            try:
                message = self._receive.receive_nowait()
            except anyio.WouldBlock:
                break
            self._in_hand = message
            handle(message)
            handled += 1
        self._in_hand = None
        self.settle()
        self.stats.handled += handled
        self.stats.turns += 1
        self.stats.busy_s += self.clock.now() - began

    def _handle_traced(self, message: M) -> None:
        assert self.tracer is not None
        with self.tracer.span(f"{self.name}: {type(message).__name__}", waiting=self.depth):
            self.handle(message)

    def _die(self, cause: BaseException) -> None:
        stopped = isinstance(cause, asyncio.CancelledError)
        death = ActorDied(f"{self.name} was stopped" if stopped else f"{self.name} failed: {cause!r}")
        self._death = death
        if not stopped:
            logger.error("actor %s failed", self.name, exc_info=cause)
        _fail_reply(self._in_hand, death)
        while True:
            try:
                _fail_reply(self._receive.receive_nowait(), death)
            except (anyio.WouldBlock, anyio.EndOfStream):
                break
        self._send.close()
        self._receive.close()
        self.on_death(death)


def _fail_reply(message: object, error: ActorDied) -> None:
    reply = getattr(message, "reply", None)
    if isinstance(reply, Reply):
        reply.fail(error)
