"""An OpenAI-compatible server over HTTP as a target."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

from ..http_stream import Exchange, connect
from ..http_stream import Target as Address
from ..prompts import PATHS
from ..sse import StreamRecord, decode, whole_answer
from .ask import Ask, joined_text
from .prometheus import parse_metrics

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_TIMEOUT_S = 10.0
"""For requests beside the load: metrics, models."""


class HttpAnswer:
    """A recorded exchange, decoded on demand."""

    def __init__(self, exchange: Exchange, *, left: bool) -> None:
        self.left = left
        self.held_bytes = sum(len(arrival.data) for arrival in exchange.arrivals)
        self._exchange: Exchange | None = exchange
        self._record: StreamRecord | None = None

    def record(self) -> StreamRecord:
        """See `Answer`."""
        if self._record is None:
            assert self._exchange is not None, "an exchange is kept until it is decoded"
            self._record = decode(self._exchange)
            if self.left:
                self._record.error = None
            self._exchange, self.held_bytes = None, 0
        return self._record


class HttpTarget:
    """See `Target`. Owned by the event loop's thread.

    Args:
        name: how reports name it.
        address: where it is.
        footprint: bytes of the server's process, if that is known; reported as metric `process_bytes`.
    """

    in_process = False

    def __init__(self, name: str, address: Address, footprint: Callable[[], float] | None = None) -> None:
        self.name = name
        self.address = address
        self._footprint = footprint
        self._ready: list[Exchange] = []
        self._open: set[Exchange] = set()
        self._received = 0
        self._has_metrics = True

    async def prepare(self, connections: int) -> None:
        """See `Target`. Raises OSError when the server cannot be reached."""
        self.drop_prepared()
        for _ in range(connections):
            self._ready.append(await connect(self.address))

    def drop_prepared(self) -> None:
        """Close connections that were opened and never used."""
        while self._ready:
            self._ready.pop().close()

    async def ask(self, ask: Ask) -> HttpAnswer:
        """See `Target`."""
        asked_s = asyncio.get_running_loop().time()
        try:
            exchange = await self._connection(ask.timeout_s)
        except (OSError, TimeoutError) as error:
            exchange = Exchange()
            exchange.sent_s = asked_s
            exchange.close(f"no connection: {error or type(error).__name__}")
            return HttpAnswer(exchange, left=False)
        self._open.add(exchange)
        try:
            exchange.send(self.address.request(PATHS[ask.endpoint], _body(ask)))
            left = await _read(exchange, ask)
        finally:
            self._open.discard(exchange)
            self._received += len(exchange.arrivals)
            exchange.close()
        return HttpAnswer(exchange, left=left)

    async def _connection(self, timeout_s: float) -> Exchange:
        while self._ready:
            exchange = self._ready.pop(0)
            if not exchange.ended:
                return exchange
        async with asyncio.timeout(timeout_s):
            return await connect(self.address)

    def received(self) -> int:
        """See `Target`."""
        return self._received + sum(len(exchange.arrivals) for exchange in self._open)

    async def scrape(self) -> dict[str, float]:
        """See `Target`: what GET /metrics says, and the process's footprint. A server without it is asked once."""
        found: dict[str, float] = {}
        if self._has_metrics:
            status, body = await self.look("/metrics")
            self._has_metrics = status == 200
            if self._has_metrics:
                found = parse_metrics(body.decode(errors="replace"))
        if self._footprint is not None:
            with contextlib.suppress(OSError):
                found["process_bytes"] = self._footprint()
        return found

    async def model_names(self) -> list[str]:
        """What GET /v1/models lists; [] when it lists nothing that can be read."""
        status, body = await self.look("/v1/models")
        try:
            return [str(entry["id"]) for entry in json.loads(body)["data"]] if status == 200 else []
        except (ValueError, KeyError, TypeError):
            return []

    async def look(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET; (0, b"") when there is no answer."""
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                exchange = await connect(self.address)
        except (OSError, TimeoutError):
            return 0, b""
        exchange.send(self.address.get(path))
        await exchange.finished(LOOK_TIMEOUT_S)
        try:
            return whole_answer(exchange)
        except (ValueError, IndexError):
            return 0, b""


async def _read(exchange: Exchange, ask: Ask) -> bool:
    """Read to the end, or leave early; says whether it left."""
    if ask.leave_after is not None:
        with contextlib.suppress(TimeoutError):
            await exchange.arrived(ask.leave_after, ask.timeout_s)
        if not exchange.ended:
            exchange.close()
            return True
    await exchange.finished(ask.timeout_s)
    return False


def _body(ask: Ask) -> dict[str, Any]:
    content: dict[str, Any] = {"messages": list(ask.messages)}
    if ask.endpoint == "completions":
        content = {"prompt": joined_text(ask)}
    stream = {"max_tokens": ask.max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    return content | ask.fields | stream
