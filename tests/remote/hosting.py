"""An engine process that is none: both ends of a real socket on one event loop, so that a test sees both."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from mlx_troupe.runtime.remote import RemoteRuntime
from mlx_troupe.runtime.remote.child import connected_pair
from mlx_troupe.runtime.remote.engine import EngineProcess, accept

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mlx_troupe.runtime import Runtime
    from mlx_troupe.runtime.service import Service


class HostedEngine:
    """Plays a child process. `kill` cuts the connection, as a death would; the runtime is freed then."""

    def __init__(self, runtime: Runtime) -> None:
        listener, self.connection = connected_pair()
        self.connection.setblocking(False)
        self.process = EngineProcess(lambda config, progress: runtime)
        self.task = asyncio.create_task(self._serve(listener))

    async def _serve(self, listener) -> None:
        await self.process.serve(await accept(listener))

    async def ended(self, grace_s: float) -> str:
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.task
                return "exit code 0"
        self.kill()
        return "killed"

    def kill(self) -> None:
        if not self.task.done():
            self.process._link.abort("killed")


@asynccontextmanager
async def served(kind: str, runtime: Runtime) -> AsyncIterator[tuple[Service, Runtime]]:
    """The runtime, entered, and a Service to ask it by: itself ("local"), or one at the other end of a socket."""
    if kind == "local":
        async with runtime:
            yield runtime, runtime
        return
    async with RemoteRuntime(runtime.config, start=lambda: HostedEngine(runtime)) as service:
        yield service, runtime
