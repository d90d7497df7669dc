"""Several prompts of one request as one: their events in one stream, their completions in one list."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import msgspec

from ..runtime.event_stream import EventStream
from ..runtime.events import PrefillProgress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from ..runtime.events import Event
    from ..runtime.generation import Completion, Generation
    from ..runtime.service import EventSource, Service


class Events(Protocol):
    """Anything that hands out events: a request's source, or several merged."""

    async def take(self) -> list[Event]:
        """All events since the last call, at least one; [] after the last choice has ended."""
        ...


@asynccontextmanager
async def events_of(service: Service, generations: Sequence[Generation]) -> AsyncIterator[Events]:
    """Submit all or none, and listen; choices are numbered through in prompt order.

    Raises what `Service.stream` raises. Leaving the block cancels what still runs.
    """
    async with AsyncExitStack() as stack:
        sources = [await stack.enter_async_context(service.stream(generation)) for generation in generations]
        if len(sources) == 1:
            yield sources[0]
            return
        merged = EventStream(choices=sum(generation.n for generation in generations), bound=64 * len(sources))
        try:
            async with asyncio.TaskGroup() as group:
                tasks, base = [], 0
                for source, generation in zip(sources, generations, strict=True):
                    tasks.append(group.create_task(_forward(source, merged, base)))
                    base += generation.n
                yield merged
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None


async def completions_of(service: Service, generations: Sequence[Generation]) -> list[Completion]:
    """Await all completions; the first error ends them all. Raises what `Service.complete` raises."""
    if len(generations) == 1:
        return [await service.complete(generations[0])]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(service.complete(generation)) for generation in generations]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _forward(source: EventSource, merged: EventStream, base: int) -> None:
    while events := await source.take():
        for event in events:
            merged.push(_renumbered(event, base))


def _renumbered(event: Event, base: int) -> Event:
    if base == 0 or isinstance(event, PrefillProgress):
        return event
    return msgspec.structs.replace(event, index=event.index + base)
