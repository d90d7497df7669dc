"""What a caller reads an accepted request's events from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from .event_stream import EventStream
    from .events import Event
    from .output.events import EventSplitter


class RequestStream:
    """Events of one accepted request. See `service.EventSource`."""

    def __init__(
        self, request_id: str, prompt_tokens: int, events: EventStream, splitter: EventSplitter | None = None
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self._events = events
        self._splitter = splitter

    async def take(self) -> list[Event]:
        """All events since the last call, at least one; [] after the last choice has ended."""
        events = await self._events.take()
        return events if self._splitter is None else self._splitter.split(events)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while events := await self.take():
            for event in events:
                yield event
