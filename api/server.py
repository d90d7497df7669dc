"""Runs the application: listens at once, serves when the model is loaded, drains when told to stop.

The first SIGTERM or SIGINT ends loading, or starts the drain: `/readyz` turns red, new requests get 503, running ones
finish within the drain's time. The second cuts everything off. A third finds the default handlers.

One task group holds all there is; when `serve` returns, no task, socket or signal handler of it is left.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

import anyio
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ..runtime.directory import ModelDirectory, directory_of
from ..runtime.service import Service
from .app import create_app
from .guard import ConnectionGuard, GuardedHandler
from .listener import Listener, listen
from .tracing import NO_TRACING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType

    from anyio.abc import TaskStatus

    from .keys import ApiKeys
    from .settings import ServerSettings
    from .tracing import Tracing

logger = logging.getLogger(__name__)

LAST_ANSWERS_S = 5.0


class ServiceContext(Service, Protocol):
    """A Service whose block loads and unloads the model, as `Runtime` is."""

    async def __aenter__(self) -> Service:
        """Load; `readiness` answers meanwhile."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        """Unload."""
        ...


class DirectoryContext(ModelDirectory, Protocol):
    """A ModelDirectory whose block serves its models, as `ModelPool` is."""

    async def __aenter__(self) -> ModelDirectory:
        """Begin to serve."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        """Unload all."""
        ...


class ForcedStop(Exception):
    """A second signal ended the server before its drain was over."""


def reaches_beyond_this_machine(host: str) -> bool:
    """Whether other machines can connect to a socket bound to `host`."""
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


@asynccontextmanager
async def listening(
    served: Service | ModelDirectory,
    settings: ServerSettings,
    keys: ApiKeys | None = None,
    tracing: Tracing = NO_TRACING,
) -> AsyncIterator[str]:
    """Listen while the block runs; gives the URL. Raises OSError when the address cannot be had.

    Leaving lets running answers end, for a few seconds; leaving by an exception or cancellation cuts them off.
    """
    runner = web.AppRunner(
        create_app(served, settings, keys, tracing),
        access_log=None,
        handler_cancellation=True,
        auto_decompress=False,
        keepalive_timeout=settings.idle_timeout_s,
        shutdown_timeout=LAST_ANSWERS_S,
        logger=_http_logger(),
    )
    await runner.setup()
    listener: Listener | None = None
    try:
        listener = await _listen(runner, settings)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        yield f"http://{host}:{listener.port}"
    except BaseException:
        if runner.server is not None:
            for connection in runner.server.connections:
                connection.force_close()
        raise
    finally:
        with anyio.CancelScope(shield=True):
            if listener is not None:
                await listener.close()
            await runner.cleanup()


def _http_logger() -> logging.Logger:
    """aiohttp's own log, without a traceback for every broken request: anybody could fill the disk with them."""
    found = logging.getLogger("mlx_troupe.http")
    found.addFilter(_is_ours)
    return found


def _is_ours(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | ConnectionError)


async def _listen(runner: web.AppRunner, settings: ServerSettings) -> Listener:
    """aiohttp's server behind the guard; a site of aiohttp's own would make unguarded connections."""
    server = runner.server
    assert server is not None
    guard = ConnectionGuard(settings.max_connections, settings.max_connections_per_address, settings.header_timeout_s)
    loop = asyncio.get_running_loop()
    handler_settings: dict[str, Any] = server._kwargs
    return await listen(
        lambda: GuardedHandler(server, guard, loop=loop, **handler_settings), settings.host, settings.port
    )


async def serve(
    served: ServiceContext | DirectoryContext,
    settings: ServerSettings,
    *,
    drain_timeout_s: float,
    keys: ApiKeys | None = None,
    tracing: Tracing = NO_TRACING,
    announce: Callable[[str], None],
) -> None:
    """Serve until a signal says stop. `announce` gets the URL once connections are accepted.

    Raises what loading raises, OSError when the address cannot be had, ForcedStop after a second signal.
    """
    failure: Exception | None = None
    stop = StopSignals()
    async with anyio.create_task_group() as group:
        await group.start(stop.watch, group.cancel_scope)
        try:
            async with listening(served, settings, keys, tracing) as url:
                announce(url)
                await _serve_loaded(served, stop, drain_timeout_s)
        except Exception as error:
            failure = error
        finally:
            group.cancel_scope.cancel()
    if stop.forced:
        raise ForcedStop
    if failure is not None:
        raise failure


async def _serve_loaded(served: ServiceContext | DirectoryContext, stop: StopSignals, drain_timeout_s: float) -> None:
    with stop.loading_scope:
        async with served:
            models = directory_of(served)
            stop.loaded = True
            gc.collect()
            gc.freeze()  # or each full collection walks what loading left: a pause of 30 ms for every stream
            logger.info("serving %s", ", ".join(entry.name for entry in models.entries()))
            await stop.requested.wait()
            logger.info("draining, for at most %g s", drain_timeout_s)
            await models.drain(drain_timeout_s)


class StopSignals:
    """SIGTERM and SIGINT, counted; owned by the loop's thread.

    Attributes:
        requested: set by the first signal.
        forced: there was a second one.
        loaded: there is something to drain.
        loading_scope: cancelled by the first signal before that.
    """

    def __init__(self) -> None:
        self.requested = anyio.Event()
        self.forced = False
        self.loaded = False
        self.loading_scope = anyio.CancelScope()

    async def watch(self, everything: anyio.CancelScope, *, task_status: TaskStatus[None]) -> None:
        """Turn signals into `requested`, then into the cancellation of `everything`."""
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for number in signals:
                logger.info("got %s", signal.Signals(number).name)
                if self.requested.is_set():
                    self.forced = True
                    everything.cancel()
                    return
                self.requested.set()
                if not self.loaded:
                    self.loading_scope.cancel()
