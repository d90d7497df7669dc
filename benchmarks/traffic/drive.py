"""Drives one load: users in a closed loop, or arrivals of an open one, until the conversations end.

An open loop never waits for answers: every conversation is a task that starts at its intended time, however many are
under way. Where the client is late, or `max_open` holds a conversation back, the request's clock has begun all the
same. Later turns are due `think_s` after the answer before them.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..figures.outcome import Outcome, outcome_of
from ..prompts import Endpoint
from ..targets.ask import Ask

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..targets.ask import Answer, Target
    from .arrivals import Level
    from .conversations import Conversation, Turn

MOST_OPEN = 4096
HELD_BYTES = 64 << 20
"""Raw answers beyond this are decoded while the load runs, oldest first."""


class DriveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are sent.

    Attributes:
        conversations: how many to start at most; None is no bound.
        duration_s: no conversation starts later; None is no bound.
        think_s: between an answer and the next turn.
        endpoint: route of an HTTP server.
        timeout_s: for one request.
        max_open: conversations under way at once, for the client's own sake.
    """

    conversations: int | None = None
    duration_s: float | None = None
    think_s: float = 0.0
    endpoint: Endpoint = "chat"
    timeout_s: float = 300.0
    max_open: int = MOST_OPEN


class Entry(NamedTuple):
    """One answered request, perhaps not decoded yet."""

    answer: Answer
    intended_s: float
    asked_s: float
    conversation: int
    turn: int
    wanted_tokens: int


class Tally:
    """Counts for the progress line, and the answers. Owned by the event loop's thread.

    Attributes:
        begun, ended: requests.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self._held: deque[tuple[int, Entry]] = deque()
        self._held_bytes = 0
        self._entries: list[Entry] = []

    def add(self, entry: Entry) -> None:
        """Keep an answer; decode old ones when too many raw bytes wait."""
        self.ended += 1
        self._entries.append(entry)
        if entry.answer.held_bytes:
            self._held.append((entry.answer.held_bytes, entry))
            self._held_bytes += entry.answer.held_bytes
        while self._held_bytes > HELD_BYTES:
            size, oldest = self._held.popleft()
            self._held_bytes -= size
            oldest.answer.record()

    def outcomes(self, begin_s: float) -> list[Outcome]:
        """Everything that happened, in order of the intended times."""
        found = [
            outcome_of(
                entry.answer.record(),
                begin_s=begin_s,
                intended_s=entry.intended_s,
                asked_s=entry.asked_s,
                conversation=entry.conversation,
                turn=entry.turn,
                wanted_tokens=entry.wanted_tokens,
                left=entry.answer.left,
            )
            for entry in self._entries
        ]
        return sorted(found, key=lambda outcome: outcome.intended_s)


class Driver:
    """One load on one target. Use once."""

    def __init__(self, target: Target, settings: DriveSettings) -> None:
        self.tally = Tally()
        self.begin_s = 0.0
        self._target = target
        self._settings = settings

    async def run(self, level: Level, conversations: Iterable[Conversation]) -> float:
        """Run the level; returns its wall seconds, from the start to the last end."""
        with quiet_client(in_process=self._target.in_process):
            loop = asyncio.get_running_loop()
            wanted = iter(_limited(conversations, self._settings.conversations))
            self.begin_s = loop.time()
            if level.schedule is None:
                await self._closed(level.users, wanted)
            else:
                await self._open(wanted)
            return loop.time() - self.begin_s

    async def _closed(self, users: int, wanted: Iterator[Conversation]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(users):
                group.create_task(self._user(wanted))

    async def _user(self, wanted: Iterator[Conversation]) -> None:
        loop = asyncio.get_running_loop()
        for conversation in wanted:
            if self._over(loop.time()):
                return
            await self._converse(conversation, loop.time())

    async def _open(self, wanted: Iterator[Conversation]) -> None:
        loop = asyncio.get_running_loop()
        places = asyncio.Semaphore(self._settings.max_open)
        async with asyncio.TaskGroup() as group:
            for conversation in wanted:
                intended_s = self.begin_s + (conversation.at_s or 0.0)
                if self._over(intended_s):
                    return
                await asyncio.sleep(max(0.0, intended_s - loop.time()))
                await places.acquire()
                task = group.create_task(self._converse(conversation, intended_s))
                task.add_done_callback(lambda _: places.release())

    def _over(self, now_s: float) -> bool:
        duration_s = self._settings.duration_s
        return duration_s is not None and now_s - self.begin_s >= duration_s

    async def _converse(self, conversation: Conversation, intended_s: float) -> None:
        """All turns of a conversation; it ends early when an answer fails or the client leaves."""
        loop = asyncio.get_running_loop()
        history: tuple[dict[str, object], ...] = ()
        for place, turn in enumerate(conversation.turns):
            if place:
                intended_s = loop.time() + self._settings.think_s
                await asyncio.sleep(self._settings.think_s)
            history += turn.messages
            asked_s = loop.time()
            answer = await self._ask(turn, history)
            self.tally.add(Entry(answer, intended_s, asked_s, conversation.number, place, turn.max_tokens))
            if place + 1 < len(conversation.turns):
                record = answer.record()
                if record.error or answer.left:
                    return
                history += ({"role": "assistant", "content": record.text},)

    async def _ask(self, turn: Turn, history: tuple[dict[str, object], ...]) -> Answer:
        settings = self._settings
        self.tally.begun += 1
        return await self._target.ask(
            Ask(history, turn.max_tokens, turn.fields, turn.leave_after, settings.endpoint, settings.timeout_s)
        )


def _limited(conversations: Iterable[Conversation], count: int | None) -> Iterator[Conversation]:
    for number, conversation in enumerate(conversations):
        if count is not None and number >= count:
            return
        yield conversation


@contextmanager
def quiet_client(*, in_process: bool) -> Iterator[None]:
    """No garbage collection in a client of its own: it would show up as a gap of the server."""
    if in_process:
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
