"""Connections that cost more than they bring: slow headers, and too many at once.

aiohttp bounds header lines (8,190 bytes) and their number (128) and closes idle connections; `body` and `streaming`
bound slow bodies and slow readers. Here: headers must be complete soon after their first byte, and connections are
counted, in all and by address.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from aiohttp.web_protocol import RequestHandler

if TYPE_CHECKING:
    from aiohttp.web_server import Server

logger = logging.getLogger(__name__)

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class ConnectionGuard:
    """Counts connections of one server. Owned by the event loop's thread.

    Args:
        most: connections at once.
        most_by_address: of one address; None is no limit.
        header_timeout_s: from a request's first byte to the end of its headers.
    """

    def __init__(self, most: int, most_by_address: int | None, header_timeout_s: float) -> None:
        self.header_timeout_s = header_timeout_s
        self.open = 0
        self._most = most
        self._most_by_address = most_by_address
        self._by_address: dict[str, int] = {}

    def enter(self, address: str) -> bool:
        """Count a connection; False, and it is not counted, when there are too many."""
        count = self._by_address.get(address, 0)
        if self.open >= self._most or (self._most_by_address is not None and count >= self._most_by_address):
            return False
        self.open += 1
        self._by_address[address] = count + 1
        return True

    def leave(self, address: str) -> None:
        """A counted connection has ended."""
        self.open -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


class GuardedHandler(RequestHandler):
    """aiohttp's connection, counted, and closed when headers take too long."""

    __slots__ = ("_address", "_guard", "_header_timer", "_refused")

    def __init__(self, server: Server, guard: ConnectionGuard, **settings: Any) -> None:  # noqa: ANN401
        super().__init__(server, **settings)
        self._guard = guard
        self._address: str | None = None
        self._refused = False
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if isinstance(peer, tuple) else "local"
        if not self._guard.enter(address):
            self._refused = True
            assert isinstance(transport, asyncio.WriteTransport)
            transport.write(_FULL)
            transport.close()
            return
        self._address = address
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """See asyncio.Protocol."""
        self._stop_timer()
        if self._refused:
            return
        if self._address is not None:
            self._guard.leave(self._address)
            self._address = None
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """See asyncio.Protocol."""
        if not self._refused:
            super().eof_received()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._refused:
            return
        super().data_received(data)
        if self._messages or self._current_request is not None:
            self._stop_timer()
        elif self._header_timer is None:
            loop = asyncio.get_running_loop()
            self._header_timer = loop.call_later(self._guard.header_timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _too_slow(self) -> None:
        self._header_timer = None
        if self.transport is not None and self._current_request is None and not self._messages:
            logger.info("a connection from %s was closed: its headers took too long", self._address)
            self.transport.abort()
