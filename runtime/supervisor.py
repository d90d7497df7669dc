"""Keeps one engine served: loads it, runs its troupe, and starts both anew when they fail.

A failure ends every request that is alive with an error, turns readiness red, and frees the engine before the model is
loaded again, on a new thread. After `restart_limit` failures within ten minutes it stays down. A thread that hangs
cannot be ended: it is given up and left alone, with what memory it holds.

Owned by the event loop's thread.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import anyio
from anyio import TASK_STATUS_IGNORED

from .errors import EngineFailed
from .loading import load_engine, on_thread
from .mlx_thread import MlxThread, ThreadEnded
from .prefix_cache import cache_folder, cache_root
from .restarts import RestartBudget
from .step_watch import StepWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskStatus

    from ..actors.cache_disk import ThreadedDisk
    from ..actors.troupe import Troupe
    from .clock import Clock
    from .config import RuntimeConfig
    from .errors import TroupeError
    from .loading import LoadedEngine
    from .models.progress import Report
    from .peers import Peer
    from .tracing import Tracer

logger = logging.getLogger(__name__)

THREAD_STOP_S = 30.0


class Supervisor:
    """See the module.

    Args:
        config: settings.
        clock: for the troupe, the engine and the restart window.
        progress: hears of downloads and conversions.
        on_failure: called with the error when the troupe has ended by itself.
        tracer: records what happens, if there is one.
        peer: this engine among the others of the process, if there are any.

    Attributes:
        loaded: the engine; None while there is none.
        troupe: its actors; None while they do not run.
        failure: why nothing is served and will not be; None while there is hope.
        trouble: why the engine is being started anew; None while it runs.
        restarts: how often it was started anew.
        load_s: how long the last load took.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        clock: Clock,
        *,
        progress: Report | None,
        on_failure: Callable[[TroupeError], None],
        tracer: Tracer | None = None,
        peer: Peer | None = None,
    ) -> None:
        self.loaded: LoadedEngine | None = None
        self.troupe: Troupe | None = None
        self.failure: str | None = None
        self.trouble: str | None = None
        self.restarts = 0
        self.load_s = 0.0
        self._config = config
        self._clock = clock
        self._progress = progress
        self._on_failure = on_failure
        self._tracer = tracer
        self._peer = peer
        self._stack = AsyncExitStack()
        self._thread: MlxThread | None = None
        self._disk: ThreadedDisk | None = None
        self._budget = RestartBudget(config.restart_limit, clock)

    async def load(self) -> None:
        """Load the model. Raises what loading raises, with nothing left behind."""
        began_s = self._clock.now()
        thread = MlxThread(f"mlx-{self._config.model or 'default'}")
        self._thread = thread
        self._stack.push_async_callback(_stop_thread, thread)
        try:
            loaded = await load_engine(
                self._config, self._clock, thread, progress=self._progress, tracer=self._tracer, peer=self._peer
            )
        except BaseException:
            await self.free()
            raise
        self._stack.push_async_callback(_free, loaded)
        self._disk = self._open_disk(loaded)
        self.loaded = loaded
        self.load_s = self._clock.now() - began_s

    async def serve(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Run the troupe of the loaded engine, and its successors, until cancelled or down for good."""
        while True:
            await self._serve_once(task_status)
            task_status = TASK_STATUS_IGNORED
            await self.free()
            if not await self._restarted():
                return

    async def free(self) -> None:
        """Free the engine on its own thread, and end the thread."""
        self.troupe = self.loaded = self._disk = None
        with anyio.CancelScope(shield=True):
            await self._stack.aclose()
        if self._peer is not None:
            self._peer.claim_bytes = 0

    def _open_disk(self, loaded: LoadedEngine) -> ThreadedDisk | None:
        """The prefix cache's disk, if it may have one; its thread ends after the troupe."""
        from ..actors.cache_disk import ThreadedDisk
        from .disk.traced import make_tier

        config = self._config
        if not (config.cache_disk_bytes and config.prefix_cache_bytes) or loaded.facts.cache_reason:
            return None
        root = cache_root(config, loaded)
        folder = cache_folder(config.cache_dir)
        tier = make_tier(self._tracer, folder, root, config.cache_disk_bytes, about=loaded.info.name)
        thread = MlxThread("prefix-cache-disk")
        disk = ThreadedDisk(tier, thread)
        self._stack.push_async_callback(_stop_thread, thread)
        self._stack.callback(disk.close)
        return disk

    async def _serve_once(self, task_status: TaskStatus[None]) -> None:
        from ..actors.troupe import Troupe

        loaded, thread = self.loaded, self._thread
        assert loaded is not None
        assert thread is not None
        troupe = Troupe(
            self._config,
            loaded.facts,
            loaded.engine,
            thread,
            clock=self._clock,
            on_failure=self._on_failure,
            disk=self._disk,
            tracer=self._tracer,
            peer=self._peer,
        )
        thread.on_death = troupe.thread_died
        try:
            async with anyio.create_task_group() as group:
                await group.start(troupe.run)
                self.troupe, self.trouble = troupe, None
                task_status.started()
                await self._watch(troupe)
        finally:
            self.troupe = None
            if self._peer is not None:
                self._peer.rest()
        self.trouble = str(troupe.failure)
        self._budget.failed()

    async def _watch(self, troupe: Troupe) -> None:
        """Wait until the troupe has ended, or give up a thread that hangs."""
        limit_s = self._config.hang_timeout_s
        interval_s = min(1.0, limit_s / 4)
        watch = StepWatch(limit_s, interval_s)
        while troupe.failure is None:
            with anyio.move_on_after(interval_s):
                await troupe.ended.wait()
            age_s = troupe.last_step_age_s
            if watch.overdue(self._clock.now(), age_s) and troupe.failure is None:
                logger.critical("a step has run for %.0f s: its thread is given up", age_s)
                if self._thread is not None:
                    self._thread.abandon()
                troupe.thread_died(EngineFailed(f"a step has run for {age_s:.0f} s and was given up"))
                await troupe.ended.wait()

    async def _restarted(self) -> bool:
        """Load again; False when it failed too often."""
        while True:
            if self._budget.spent:
                self.failure = self.trouble
                logger.critical("the engine failed %d times and stays down: %s", self._budget.failures, self.failure)
                return False
            logger.error("the engine failed and is started anew: %s", self.trouble)
            await anyio.sleep(self._budget.backoff_s)
            try:
                await self.load()
            except Exception as error:
                logger.exception("the engine could not be started anew")
                self.trouble = str(error)
                self._budget.failed()
                continue
            self.restarts += 1
            return True


async def _free(loaded: LoadedEngine) -> None:
    """Free the engine's arrays on their own thread, and the tokenizer threads."""
    if loaded.thread.alive:
        with anyio.move_on_after(THREAD_STOP_S), contextlib.suppress(ThreadEnded):
            await on_thread(loaded.thread, loaded.engine.close)
    await anyio.to_thread.run_sync(loaded.text.close)
    await anyio.to_thread.run_sync(loaded.outputs.close)


async def _stop_thread(thread: MlxThread) -> None:
    """End an MLX thread; its streams go first, or MLX may abort the process at exit."""
    with contextlib.suppress(ThreadEnded):
        thread.submit(_clear_streams)
    await anyio.to_thread.run_sync(lambda: thread.close(THREAD_STOP_S))


def _clear_streams() -> None:
    if "mlx.core" in sys.modules:
        from .engine.device import clear_streams

        clear_streams()
