"""Starts the engine process and ends it; used by the front process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import anyio

from ..errors import EngineFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

LONGEST_PATH_BYTES = 100
"""Addresses of Unix sockets end there, nearly."""
KILLED_S = 10.0


class Engine(Protocol):
    """A started engine process, or what plays its part in tests.

    Attributes:
        connection: to it.
    """

    connection: socket.socket

    async def ended(self, grace_s: float) -> str:
        """Wait for its end, at most so long, then kill it; says how it ended."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


def connected_pair() -> tuple[socket.socket, socket.socket]:
    """A listening Unix socket for the engine process, and the one connection to it.

    The socket's file has mode 0600 in a folder of mode 0700, and both are gone when this returns: the connection waits
    in the listener's queue, and nobody can make another.
    """
    with tempfile.TemporaryDirectory(prefix="mlx-troupe-", dir=_short_folder()) as folder:
        path = Path(folder) / "engine"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(1)
            connection.connect(str(path))
        except BaseException:
            listener.close()
            connection.close()
            raise
    return listener, connection


def _short_folder() -> str:
    """Where temporary files go, or /tmp if a socket's address cannot hold that."""
    found = tempfile.gettempdir()
    return found if len(os.fsencode(found)) + 32 < LONGEST_PATH_BYTES else "/tmp"


class ChildEngine:
    """The engine process as a child of this one.

    It inherits stderr for its log, and the read end of a pipe as stdin, whose end tells it that this process is gone.
    """

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self.connection = connection
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def ended(self, grace_s: float) -> str:
        """See `Engine`. Cancelling this kills the process."""
        try:
            code = await anyio.to_thread.run_sync(self._wait, grace_s, abandon_on_cancel=True)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            self.kill()
            if self._process.stdin is not None:
                self._process.stdin.close()
        if code is None:
            return "it did not end and was killed"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _wait(self, grace_s: float) -> int:
        return self._process.wait(grace_s)

    def kill(self) -> None:
        """See `Engine`."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(KILLED_S)


def start_child(command: Sequence[str]) -> ChildEngine:
    """Start `command` with the number of its listening socket's descriptor as last argument.

    Raises:
        EngineFailed: it cannot be started.
    """
    try:
        listener, connection = connected_pair()
    except OSError as error:
        raise EngineFailed(f"no socket for the engine process: {error}") from None
    try:
        process = subprocess.Popen(
            [*command, str(listener.fileno())], stdin=subprocess.PIPE, stdout=2, pass_fds=[listener.fileno()]
        )
    except OSError as error:
        connection.close()
        raise EngineFailed(f"the engine process cannot be started: {error}") from None
    finally:
        listener.close()
    connection.setblocking(False)
    return ChildEngine(process, connection)
