"""One HTTP/1.1 POST over a bare asyncio transport, recorded while it runs and decoded afterwards.

The client shares its cores with the server under test. So while the clock matters it only appends
(time, bytes) pairs; chunk framing, server-sent events and JSON are decoded in `sse.py` once the
load is over. Connecting and sending are separate steps, because a server with a short accept
backlog (Python's `http.server`: 5) would otherwise be measured by its dropped SYN packets.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import argparse

LAST_CHUNK = b"\r\n0\r\n\r\n"


class Arrival(NamedTuple):
    """Bytes handed over by the kernel at `time_s` on the loop's clock."""

    time_s: float
    data: bytes


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send requests, which model name to use, and an optional API key."""

    host: str
    port: int
    model: str
    prefix: str = ""
    api_key: str | None = None
    secure: bool = False

    @classmethod
    def from_url(cls, url: str, model: str, api_key: str | None = None) -> Target:
        """`url` is what stands before `/v1`: `http://127.0.0.1:8080`."""
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"--url must be http://host:port or https://host:port, not {url!r}")
        secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if secure else 80), model, prefix, api_key, secure)

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Target:
        """The target that the options of `add_target_arguments` name."""
        return cls.from_url(options.url, options.model, options.api_key)

    def request(self, path: str, body: dict[str, Any]) -> bytes:
        """The whole request as bytes; the model's name is added to `body`."""
        payload = json.dumps({"model": self.model, **body}).encode()
        lines = (
            "Content-Type: application/json",
            "Accept: text/event-stream, application/json",
            f"Content-Length: {len(payload)}",
        )
        return self._head("POST", path, lines) + payload

    def get(self, path: str) -> bytes:
        """A request without a body, as bytes."""
        return self._head("GET", path)

    def _head(self, method: str, path: str, more: tuple[str, ...] = ()) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {host}:{self.port}", "Connection: close", *more]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n"


class Exchange(asyncio.Protocol):
    """A connection that carries one request; lives on the event loop's thread.

    It ends when the peer closes, or at the last chunk of a chunked body, whichever comes first.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._tail = b""
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self.arrivals: list[Arrival] = []
        self.sent_s = 0.0
        self.end_s = 0.0
        self.failure: str | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more can arrive."""
        return self._finished.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.arrivals.append(Arrival(self._loop.time(), data))
        self._tail = (self._tail + data)[-len(LAST_CHUNK) :]
        if self._waiters:
            self._wake()
        if self._tail == LAST_CHUNK:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and self.failure is None:
            self.failure = f"connection lost: {exc}"
        self._finish()

    def send(self, request: bytes) -> None:
        """Write the request; the exchange's clock starts here."""
        assert self._transport is not None, "send() comes after the connection"
        self.sent_s = self._loop.time()
        self._transport.write(request)

    def close(self, failure: str | None = None) -> None:
        """Close the connection, as a client that leaves does; keeps what arrived."""
        self.failure = self.failure or failure
        self._finish()
        if self._transport is not None:
            self._transport.close()

    async def finished(self, timeout_s: float) -> None:
        """Wait for the end; a time-out closes the connection and becomes `failure`."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._finished)
        except TimeoutError:
            self.close(f"no end within {timeout_s:.0f} s")

    async def arrived(self, count: int, timeout_s: float) -> None:
        """Wait until `count` pieces of data arrived or the exchange ended. Raises TimeoutError."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append((count, waiter))
        self._wake()
        async with asyncio.timeout(timeout_s):
            await waiter

    def _wake(self) -> None:
        for count, waiter in self._waiters:
            if not waiter.done() and (len(self.arrivals) >= count or self._finished.done()):
                waiter.set_result(None)
        self._waiters = [entry for entry in self._waiters if not entry[1].done()]

    def _finish(self) -> None:
        if not self._finished.done():
            self.end_s = self._loop.time()
            self._finished.set_result(None)
            self._wake()


async def connect(target: Target) -> Exchange:
    """Open a connection to the target. Raises OSError."""
    loop = asyncio.get_running_loop()
    context = ssl.create_default_context() if target.secure else None
    _, exchange = await loop.create_connection(Exchange, target.host, target.port, ssl=context)
    return exchange


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `Target.from_options` reads."""
    parser.add_argument("--url", required=True, help="http(s)://host:port of the server")
    parser.add_argument("--model", required=True, help="model name to send")
    parser.add_argument("--api-key", help="sent as a bearer token")
