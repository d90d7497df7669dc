"""The engine process's life: a greeting, loading, serving, and an end when the front says so or is gone."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Protocol

import anyio
import msgspec

from ..errors import EngineFailed
from .host import EngineHost
from .link import Link
from .to_engine import Hello, Stop, ToEngine, wire_version
from .to_front import Failure, Loaded, LoadFailed, Loading, Welcome

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from types import TracebackType

    from ..config import RuntimeConfig
    from ..facade import Runtime
    from ..models.progress import Progress, Report
    from .host import Openable

    class OpenableContext(Openable, Protocol):
        """An Openable whose block loads and unloads it, as `Runtime` is."""

        async def __aenter__(self) -> Openable:
            """Load; `readiness` answers meanwhile."""
            ...

        async def __aexit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
        ) -> bool | None:
            """Unload."""
            ...

    OpenRuntime = Callable[[RuntimeConfig, Report], OpenableContext]

logger = logging.getLogger(__name__)

HELLO_S = 30.0
LAST_WORDS_S = 5.0
ORPHAN_S = 30.0
REPORT_S = 0.05

FROM_FRONT: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)


def open_runtime(config: RuntimeConfig, progress: Report) -> Runtime:
    """The real one."""
    from ..facade import Runtime

    return Runtime(config, progress=progress)


async def accept(listener: socket.socket) -> socket.socket:
    """The one connection there will be. Raises TimeoutError."""
    listener.setblocking(False)
    async with asyncio.timeout(HELLO_S):
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
    listener.close()
    return connection


class EngineProcess:
    """One connection's life. Owned by the event loop's thread.

    Args:
        open_runtime: makes the runtime, which loads when entered.
    """

    def __init__(self, open_runtime: OpenRuntime) -> None:
        self._open_runtime = open_runtime
        self._hello: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._host: EngineHost | None = None
        self._stopping = anyio.Event()
        self._loading = anyio.CancelScope()
        self._loaded = False
        self._link: Link[ToEngine] = Link(FROM_FRONT, self._hear, self._lost, self._gather)

    async def serve(self, connection: socket.socket) -> None:
        """Serve the front at the other end, until it stops this or is gone."""
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: self._link, connection)
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await self._hello
        except (TimeoutError, ConnectionError) as error:
            logger.error("no front process greeted this one: %s", error)
            self._link.abort("no greeting")
            return
        await self._serve(hello)
        await self._link.close(LAST_WORDS_S)

    def stop(self) -> None:
        """End everything."""
        self._stopping.set()
        if not self._loaded:
            self._loading.cancel()

    async def _serve(self, hello: Hello) -> None:
        if hello.version != wire_version():
            text = f"the installed mlx-troupe is {wire_version()} now, this server {hello.version}: start it again"
            self._link.send(LoadFailed(Failure.of(EngineFailed(text))))
            return
        self._link.send(Welcome(os.getpid()))
        runtime = self._open_runtime(hello.config, self._reporter())
        async with asyncio.TaskGroup() as group:
            self._host = EngineHost(
                self._link, lambda _: runtime, group, self.stop, event_buffer=hello.config.event_buffer
            )
            pulse = group.create_task(self._host.keep_pulsing())
            try:
                with self._loading:
                    await self._load_and_serve(runtime)
            except Exception as error:
                logger.debug("the runtime ended by an error", exc_info=True)
                self._link.send(LoadFailed(Failure.of(error)))
            pulse.cancel()
            self._host.close()

    async def _load_and_serve(self, runtime: OpenableContext) -> None:
        assert self._host is not None
        async with runtime:
            self._loaded = True
            gc.collect()
            gc.freeze()  # or each full collection walks what loading left
            self._host.pulse()
            self._link.send(Loaded())
            await self._stopping.wait()

    def _reporter(self) -> Report:
        """Sends progress on; called on other threads, and far more often than anybody looks."""
        loop = asyncio.get_running_loop()
        sent_s: dict[str, float] = {}

        def report(progress: Progress) -> None:
            now_s = time.monotonic()
            complete = progress.total is not None and progress.done >= progress.total
            if not complete and now_s - sent_s.get(progress.stage, 0.0) < REPORT_S:
                return
            sent_s[progress.stage] = now_s
            message = Loading(progress.stage, progress.done, progress.total, progress.unit)
            loop.call_soon_threadsafe(self._link.send, message)

        return report

    # --- called by the link ---------------------------------------------------------------------------------------

    def _hear(self, message: ToEngine) -> None:
        match message:
            case Hello() if not self._hello.done():
                self._hello.set_result(message)
            case Stop():
                self.stop()
            case _ if self._host is not None:
                self._host.hear(message)
            case _:
                raise ValueError("the first message is a Hello, and the second waits for the answer")

    def _gather(self) -> list[bytearray]:
        return [] if self._host is None else self._host.gather()

    def _lost(self, reason: str) -> None:
        if not self._hello.done():
            self._hello.set_exception(ConnectionError(reason))
        self.stop()


def watch_parent(lifeline: int, gone: Callable[[], object]) -> None:
    """Have `gone` called, on a thread, once nobody holds the other end of `lifeline` any more.

    If that does not end this process within ORPHAN_S, because its loop or the MLX thread hangs, the thread ends it.
    """

    def watch() -> None:
        while os.read(lifeline, 64):
            pass
        gone()
        time.sleep(ORPHAN_S)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
