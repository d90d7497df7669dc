"""Moves an encoder's bytes to a socket: late headers, keep-alive comments, bounded patience with slow readers.

A token costs one task wake-up and one `transport.write`. So the chunk framing is done here, straight on the transport,
instead of through two coroutines of aiohttp a write (tests hold that the result is the same), and the
keep-alive is one timer a stream rather than a timeout a wait.

Invariants:
- until the headers are out, an error has its own HTTP status; after that, it is an event and the connection closes;
- a stream is silent for at most `keepalive_interval_s`, whatever the runtime does;
- a reader that stops reading holds at most one batch beyond `write_buffer_bytes`, for at most twice `write_timeout_s`;
  its request is cancelled then, and it costs other streams nothing.

Owned by the handler's task, on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from aiohttp import HttpVersion11, web

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..runtime.events import Event
    from .encoding import StreamEncoder
    from .sources import Events

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class StallGuard:
    """Cuts a connection off when its reader takes nothing for `timeout_s` while the block waits for it.

    The handler is cancelled for it, as for any lost connection, or finds the transport closing.

    Args:
        transport: the connection's.
        timeout_s: how long nothing may be taken.
        on_cut: called just before the connection is cut.
    """

    def __init__(self, transport: asyncio.WriteTransport, timeout_s: float, on_cut: Callable[[], None]) -> None:
        self._on_cut = on_cut
        self._transport = transport
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._waiting_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> StallGuard:
        self._waiting_bytes = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._timeout_s, self._check)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        waiting_bytes = self._transport.get_write_buffer_size()
        if waiting_bytes >= self._waiting_bytes:
            self._on_cut()
            self._transport.abort()
            return
        self._waiting_bytes = waiting_bytes
        self._timer = self._loop.call_later(self._timeout_s, self._check)


class EventStreamWriter:
    """One event stream's response.

    Attributes:
        response: what aiohttp knows of it.
        last_write: loop time of the last bytes.

    Args:
        request: the request it answers.
        write_timeout_s: longest wait for a reader that does not read.
        write_buffer_bytes: where the socket's buffer counts as full.
        on_cut: called when the connection is cut for it.
    """

    def __init__(
        self, request: web.Request, *, write_timeout_s: float, write_buffer_bytes: int, on_cut: Callable[[], None]
    ) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self.last_write = 0.0
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._on_cut = on_cut
        self._write_timeout_s = write_timeout_s
        self._write_buffer_bytes = write_buffer_bytes
        self._framed = request.version >= HttpVersion11
        self._transport: asyncio.WriteTransport | None = None
        self._protocol = request.protocol

    @property
    def opened(self) -> bool:
        """The headers are out."""
        return self._transport is not None

    async def open(self) -> None:
        """Send the headers."""
        await self.response.prepare(self._request)
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        transport.set_write_buffer_limits(high=self._write_buffer_bytes)
        self._transport = transport

    def write_now(self, data: bytes) -> None:
        """Hand bytes to the socket, whether or not its buffer is full. Raises ConnectionResetError."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._framed else data)
        self.last_write = self._loop.time()

    async def write(self, data: bytes) -> None:
        """Hand bytes to the socket and wait while its buffer is full. Raises ConnectionResetError."""
        self.write_now(data)
        if self._protocol.writing_paused:
            await self._drained()

    @property
    def backed_up(self) -> bool:
        """The reader is behind, and the socket's buffer full."""
        return self._protocol.writing_paused

    async def _drained(self) -> None:
        if self._transport is None:
            return
        with StallGuard(self._transport, self._write_timeout_s, self._on_cut):
            await self._request.writer.drain()

    async def close(self) -> None:
        """End the response as it should."""
        await self.response.write_eof()

    async def fail(self, data: bytes) -> None:
        """Send a last error event, if the client is there, and end both the response and the connection."""
        self.response.force_close()
        with suppress(ConnectionError):
            await self.write(data)
            await self.close()


async def send_whole(
    request: web.Request, response: web.Response, write_timeout_s: float, on_cut: Callable[[], None]
) -> None:
    """Send an answer that is not streamed, here rather than in aiohttp, which would wait for its reader for ever.

    Raises ConnectionError when the client is gone.
    """
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client is gone")
    await response.prepare(request)
    with StallGuard(transport, write_timeout_s, on_cut):
        await response.write_eof()


class Heartbeat:
    """Calls `beat` whenever `interval_s` has passed since `last_activity()`. One timer, however many tokens pass."""

    def __init__(self, interval_s: float, last_activity: Callable[[], float], beat: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._last_activity = last_activity
        self._beat = beat
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Heartbeat:
        self._timer = self._loop.call_at(self._last_activity() + self._interval_s, self._fire)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        now = self._loop.time()
        due = self._last_activity() + self._interval_s
        if now >= due:
            self._beat()
            due = now + self._interval_s
        self._timer = self._loop.call_at(due, self._fire)


async def stream_events(
    source: Events, encoder: StreamEncoder, writer: EventStreamWriter, keepalive_interval_s: float
) -> None:
    """Send a request's events until its end, an error event included.

    Raises ApiError for an error before the headers are out, ConnectionError when the client is gone.
    """
    data = await _first_bytes(source, encoder, keepalive_interval_s)
    if encoder.error is not None:
        raise encoder.error
    await writer.open()
    await writer.write(encoder.opening() + (data or encoder.keepalive()))

    def beat() -> None:
        if not writer.backed_up:
            with suppress(ConnectionResetError):  # the handler is being cancelled for it
                writer.write_now(encoder.keepalive())

    with Heartbeat(keepalive_interval_s, lambda: writer.last_write, beat):
        while not encoder.finished:
            events = await source.take()
            data = encoder.encode(events) if events else encoder.broken_off()
            if data:
                await writer.write(data)
    if encoder.failed:
        writer.response.force_close()
    await writer.close()


async def _first_bytes(source: Events, encoder: StreamEncoder, patience_s: float) -> bytes:
    """The first visible bytes, or b"" when there are none for `patience_s`. No event is lost."""
    data = b""
    try:
        async with asyncio.timeout(patience_s):
            while not data and not encoder.finished:
                events: list[Event] = await source.take()
                data = encoder.encode(events) if events else encoder.broken_off()
    except TimeoutError:
        pass
    return data
