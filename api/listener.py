"""Accepts connections one a turn of the loop, whatever waits.

asyncio's own server accepts all that wait in one turn, up to its backlog: in a storm of connections each turn then has
the work of hundreds of new ones, and every stream waits for it. Here the storm waits in the kernel instead.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

BACKLOG = 1024
EXHAUSTED_S = 1.0
"""How long to wait when the process has no file descriptors left."""


class Listener:
    """Sockets that listen until `close`. Owned by the event loop's thread.

    Args:
        new_protocol: makes a connection's protocol.
        sockets: bound and listening, not blocking.

    Attributes:
        port: that of the first socket.
    """

    def __init__(self, new_protocol: Callable[[], asyncio.Protocol], sockets: list[socket.socket]) -> None:
        self.port: int = sockets[0].getsockname()[1]
        self._new_protocol = new_protocol
        self._sockets = sockets
        self._tasks = [asyncio.get_running_loop().create_task(self._accept(listening)) for listening in sockets]

    async def close(self) -> None:
        """Stop listening; connections stay."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listening in self._sockets:
            listening.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    logger.error("no connection can be accepted: %s", error)
                    await asyncio.sleep(EXHAUSTED_S)
                continue
            try:
                await loop.connect_accepted_socket(self._new_protocol, connection)
            except OSError:
                connection.close()


async def listen(new_protocol: Callable[[], asyncio.Protocol], host: str, port: int) -> Listener:
    """Listen on every address that `host` has. Raises OSError when one cannot be had."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            listening = socket.socket(family, kind, protocol)
            sockets.append(listening)
            listening.setblocking(False)
            if os.name == "posix":
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
    except OSError as error:
        for listening in sockets:
            listening.close()
        text = f"cannot listen on {host} port {port}: {(error.strerror or str(error)).lower()}"
        raise OSError(error.errno, text) from None
    return Listener(new_protocol, sockets)
