"""The runtime in this process as a target: no HTTP, no JSON, the same requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from mlx_troupe.runtime.errors import TroupeError
from mlx_troupe.runtime.events import Failed, Finished, ReasoningDelta, TextDelta
from mlx_troupe.runtime.generation import Generation
from mlx_troupe.runtime.sampling_params import SamplingParams

from ..sse import StreamRecord
from .ask import Ask, joined_text
from .prometheus import parse_metrics

if TYPE_CHECKING:
    from mlx_troupe.runtime.service import EventSource, Service

SAMPLING_FIELDS = {field.name for field in msgspec.structs.fields(SamplingParams)}
OWN_FIELDS = {"ignore_eos", "stop", "min_tokens", "cache_salt", "priority"}


class LocalAnswer:
    """A record that needs no decoding."""

    held_bytes = 0

    def __init__(self, record: StreamRecord, *, left: bool) -> None:
        self.left = left
        self._record = record

    def record(self) -> StreamRecord:
        """See `Answer`."""
        return self._record


class LocalTarget:
    """See `Target`. Lives on the service's event loop."""

    in_process = True

    def __init__(self, name: str, service: Service) -> None:
        self.name = name
        self._service = service
        self._received = 0
        self._asked = 0

    async def prepare(self, connections: int) -> None:
        """Nothing to open."""

    async def ask(self, ask: Ask) -> LocalAnswer:
        """See `Target`."""
        loop = asyncio.get_running_loop()
        record = StreamRecord(loop.time(), 0.0)
        left = False
        try:
            async with asyncio.timeout(ask.timeout_s), self._service.stream(self._generation(ask)) as source:
                record.prompt_tokens = source.prompt_tokens
                left = await self._listen(source, record, ask.leave_after)
        except TimeoutError:
            record.error = f"no end within {ask.timeout_s:.0f} s"
        except TroupeError as error:
            record.error = f"refused, {error.code}: {error.message}"
        record.end_s = loop.time()
        return LocalAnswer(record, left=left)

    async def _listen(self, source: EventSource, record: StreamRecord, leave_after: int | None) -> bool:
        now = asyncio.get_running_loop().time
        pieces = 0
        while events := await source.take():
            at_s = now()
            pieces += 1
            self._received += 1
            for event in events:
                if isinstance(event, TextDelta | ReasoningDelta):
                    if event.text:
                        record.text_times_s.append(at_s)
                        record.text += event.text
                elif isinstance(event, Finished):
                    record.finish_reason = event.reason
                    record.usage_tokens = event.usage.completion_tokens
                    record.cached_tokens = event.usage.cached_tokens
                elif isinstance(event, Failed):
                    record.error = f"failed, {event.code}: {event.message}"
            if leave_after is not None and pieces >= leave_after and record.finish_reason is None:
                return True
        return False

    def received(self) -> int:
        """See `Target`."""
        return self._received

    async def scrape(self) -> dict[str, float]:
        """See `Target`."""
        return parse_metrics((await self._service.metrics()).decode())

    def _generation(self, ask: Ask) -> Generation:
        self._asked += 1
        fields = dict(ask.fields)
        sampling = {name: fields.pop(name) for name in list(fields) if name in SAMPLING_FIELDS}
        own: dict[str, Any] = {name: fields.pop(name) for name in list(fields) if name in OWN_FIELDS}
        if fields:
            raise TroupeError(f"in process there is no field {', '.join(fields)}", code="unknown_field")
        if ask.endpoint == "chat" and self._service.model.has_chat_template:
            own["messages"] = ask.messages
        else:
            own["prompt"] = joined_text(ask)
        try:
            params = msgspec.convert(sampling, SamplingParams)
            return msgspec.convert(
                own | {"max_tokens": ask.max_tokens, "sampling": params, "request_id": f"bench-{self._asked}"},
                Generation,
            )
        except msgspec.ValidationError as error:
            raise TroupeError(str(error), code="bad_field") from None
