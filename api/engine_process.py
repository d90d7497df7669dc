"""The engine process of `serve --api-process on`, which alone starts it:

    python -m mlx_troupe.api.engine_process LOG_LEVEL LOG_FORMAT EVENT_LOOP DESCRIPTOR

DESCRIPTOR is a listening Unix socket with the front process in its queue; stdin ends when the front process does.
Signals are the front process's affair: a terminal's Ctrl-C and a service manager's SIGTERM reach both, and only one may
act.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from typing import TYPE_CHECKING

from ..runtime.remote.engine import EngineProcess, accept, open_runtime, watch_parent
from .event_loop import loop_factory
from .logs import set_up_logging

if TYPE_CHECKING:
    from collections.abc import Sequence


def command(log_level: str, log_format: str, event_loop: str) -> list[str]:
    """What starts it, but for the descriptor. Modules that lie in the working folder are none of ours (-P)."""
    return [sys.executable, "-P", "-m", __spec__.name, log_level, log_format, event_loop]


def main(arguments: Sequence[str]) -> None:
    """Serve the front process until it stops this or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log_level, log_format, event_loop, descriptor = arguments
    set_up_logging(log_level, log_format)
    with asyncio.Runner(loop_factory=loop_factory(event_loop)) as runner:
        runner.run(_serve(socket.socket(fileno=int(descriptor))))


async def _serve(listener: socket.socket) -> None:
    process = EngineProcess(open_runtime)
    loop = asyncio.get_running_loop()
    watch_parent(sys.stdin.fileno(), lambda: loop.call_soon_threadsafe(process.stop))
    await process.serve(await accept(listener))


if __name__ == "__main__":
    main(sys.argv[1:])
