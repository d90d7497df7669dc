"""Answers the front process's calls with the runtime of this one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Protocol

from ..errors import NotReady, TroupeError
from .link import Link, encoded
from .outlets import Outbox, Outlet, WordsSent
from .to_engine import (
    AskMetrics,
    AskStatus,
    Call,
    Cancel,
    Close,
    CountTokens,
    Detokenize,
    Drain,
    Embed,
    Hello,
    Open,
    Stop,
    ToEngine,
    Tokenize,
)
from .to_front import Accepted, Answer, Failure, Pulse, Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..event_stream import Mailbox
    from ..facade import OpenRequest
    from ..generation import Generation, ModelInfo
    from ..service import Readiness, Service

    class Openable(Service, Protocol):
        """A Service whose requests may go to any mailbox, as `Runtime` is."""

        async def open(self, generation: Generation, events: Mailbox) -> OpenRequest:
            """See `Runtime.open`."""
            ...


logger = logging.getLogger(__name__)

PULSE_S = 0.25
"""How often a change of readiness is looked for."""
HEARTBEAT_S = 1.0
EVENT_BUFFER = 64


class EngineHost:
    """Owned by the event loop's thread. A task lives as long as a call waits for its answer; streams have none.

    Args:
        link: to the front process; its `gather` is this host's.
        find: the runtime of a model's name. Raises TroupeError for a name that is not served.
        group: where calls run.
        stop: called when the front process says so.
    """

    def __init__(
        self,
        link: Link[ToEngine],
        find: Callable[[str], Openable],
        group: asyncio.TaskGroup,
        stop: Callable[[], None],
        *,
        models: tuple[str, ...] = ("",),
        event_buffer: int = EVENT_BUFFER,
    ) -> None:
        self._link = link
        self._find = find
        self._group = group
        self._stop = stop
        self._models = models
        self._event_buffer = event_buffer
        self._outbox = Outbox(link.schedule, ended=self._ended, broken=self._broken, failed=self.pulse)
        self.gather = self._outbox.gather
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._open: dict[int, tuple[Outlet, OpenRequest]] = {}
        self._words: dict[str, WordsSent] = {}
        self._told: dict[str, tuple[Readiness, ModelInfo | None]] = {}

    def hear(self, message: ToEngine) -> None:
        """Begin what the front asks for. Raises ValueError for what no front says."""
        match message:
            case Hello():
                raise ValueError("a second Hello")
            case Close(number=number):
                self._close(number)
            case Cancel(request_id=request_id, model=model):
                with contextlib.suppress(TroupeError):
                    self._find(model).cancel(request_id)
            case Stop():
                self._stop()
            case _:
                number = message.number
                if number in self._calls or number in self._open:
                    raise ValueError(f"call {number} is under way")
                task = self._calls[number] = self._group.create_task(self._answer(message))
                task.add_done_callback(lambda _: self._calls.pop(number))

    # --- calls ----------------------------------------------------------------------------------------------------

    async def _answer(self, message: Call) -> None:
        reply: Accepted | Answer | Refused
        try:
            reply = await self._reply(message)
        except TroupeError as error:
            reply = Refused(message.number, Failure.of(error))
        except Exception as error:
            logger.exception("a call failed")
            reply = Refused(message.number, Failure.of(error))
        try:
            self._link.send(reply)
        except Exception as error:
            logger.exception("an answer cannot be sent")
            self._link.send(Refused(message.number, Failure.of(error)))

    async def _reply(self, message: Call) -> Accepted | Answer:
        service = self._find(message.model)
        value: object
        match message:
            case Open():
                return await self._submit(message, service)
            case Embed(query=query):
                value = await service.embed(query)
            case Tokenize(text=text, add_special_tokens=add):
                value = await service.tokenize(text, add_special_tokens=add)
            case Detokenize(tokens=tokens):
                value = await service.detokenize(tokens)
            case CountTokens(generation=generation):
                value = await service.count_tokens(generation)
            case AskStatus():
                value = await service.status()
            case AskMetrics():
                value = await service.metrics()
            case Drain(timeout_s=timeout_s):
                await service.drain(timeout_s)
                value = None
        return Answer(message.number, encoded(value))

    async def _submit(self, message: Open, service: Openable) -> Accepted:
        generation = message.generation
        outlet = Outlet(
            message.number,
            self._outbox,
            choices=generation.n,
            bound=self._event_buffer,
            whole=message.whole,
            words=self._words_of(message.model, service) if _names_tokens(generation) else None,
        )
        opened = await service.open(generation, outlet)
        self._open[message.number] = outlet, opened
        outlet.start(opened.splitter)
        return Accepted(message.number, opened.request_id, opened.prompt_tokens)

    def _words_of(self, model: str, service: Openable) -> WordsSent:
        if model not in self._words:
            self._words[model] = WordsSent(service.token_text, model)
        return self._words[model]

    def _close(self, number: int) -> None:
        """Nobody waits for the call: what it does is cancelled. A call that has ended may be closed too."""
        call = self._calls.get(number)
        if call is not None:
            call.cancel()
        found = self._open.pop(number, None)
        if found is not None:
            outlet, opened = found
            outlet.stop()
            opened.close()

    def close(self) -> None:
        """Cancel the calls that wait."""
        for call in self._calls.values():
            call.cancel()

    def _ended(self, number: int) -> None:
        self._open.pop(number, None)

    def _broken(self, number: int, error: Exception) -> None:
        self._close(number)
        self._link.send(Refused(number, Failure.of(error)))

    # --- readiness ------------------------------------------------------------------------------------------------

    async def keep_pulsing(self) -> None:
        """Tell the front about changes of readiness, and at an interval that this process lives."""
        loop = asyncio.get_running_loop()
        last_s = loop.time()
        while True:
            due = loop.time() - last_s >= HEARTBEAT_S
            if due:
                last_s = loop.time()
            self.pulse(even_if_known=due)
            await asyncio.sleep(PULSE_S)

    def pulse(self, *, even_if_known: bool = False) -> None:
        """Tell the front what is served and whether it is ready, unless it knows."""
        for model in self._models:
            service = self._find(model)
            now = service.readiness(), _info(service)
            if even_if_known or now != self._told.get(model):
                self._told[model] = now
                self._link.send(Pulse(*now, model))


def _info(service: Service) -> ModelInfo | None:
    try:
        return service.model
    except NotReady:
        return None


def _names_tokens(generation: Generation) -> bool:
    return generation.sampling.top_logprobs is not None or generation.prompt_logprobs is not None
