"""The mailbox between a row and its listener.

A channel send costs 15-30 us and wakes a task each time; at 64 rows a step that is more than the step's own Python.
So each request gets a list that decode appends to (under 1 us) and one wake-up a batch. It is bounded all the same:
past `bound` undelivered events, text deltas are merged into the last one, and their number is bounded by max_tokens.
Owned by the event loop's thread; not thread-safe.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from .events import ENDS, Event, PrefillProgress, TextDelta

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Mailbox(Protocol):
    """Where a row's events go."""

    def push(self, event: Event) -> None:
        """Add an event. Never blocks, never raises."""
        ...


class EventStream:
    """Events of one request (all its choices), in order, to one reader.

    Args:
        choices: how many final events to expect; iteration ends after the last one.
        bound: undelivered events beyond which deltas are merged.
    """

    __slots__ = ("_bound", "_events", "_open", "_waiter")

    def __init__(self, *, choices: int = 1, bound: int = 64) -> None:
        self._events: list[Event] = []
        self._open = choices
        self._bound = bound
        self._waiter: asyncio.Future[None] | None = None

    def push(self, event: Event) -> None:
        """Add an event and wake the reader. Never blocks."""
        events = self._events
        if len(events) >= self._bound and merge(events, event):
            return
        events.append(event)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def push_all(self, events: list[Event]) -> None:
        """Add events that came together; the list is the stream's then."""
        if len(self._events) + len(events) > self._bound:
            for event in events:
                self.push(event)
            return
        self._events = self._events + events if self._events else events
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def clear(self) -> None:
        """Forget what waits; for a reader that wants nothing more."""
        self._events = []

    @property
    def exhausted(self) -> bool:
        """Every choice's end has been taken."""
        return self._open <= 0

    async def take(self) -> list[Event]:
        """All events since the last call, at least one; [] once every choice has ended.

        Text deltas of one choice that wait together are handed out as they came, not merged, unless past the bound.
        """
        while not self._events:
            if self._open <= 0:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events = self._events, []
        self._open -= sum(isinstance(event, ENDS) for event in events)
        return events

    async def __aiter__(self) -> AsyncIterator[Event]:
        while events := await self.take():
            for event in events:
                yield event


def merge(events: list[Event], event: Event) -> bool:
    """Let an undelivered event take in a later one of its kind and choice; False where there is none."""
    for place in range(len(events) - 1, -1, -1):
        last = events[place]
        if isinstance(event, PrefillProgress) and isinstance(last, PrefillProgress):
            events[place] = event
            return True
        if isinstance(event, TextDelta) and isinstance(last, TextDelta) and last.index == event.index:
            events[place] = _joined(last, event)
            return True
    return False


def _joined(first: TextDelta, second: TextDelta) -> TextDelta:
    logprobs = None if first.logprobs is None else first.logprobs + (second.logprobs or ())
    return TextDelta(first.text + second.text, first.tokens + second.tokens, logprobs, first.index)
