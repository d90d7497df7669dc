"""The one thread on which an engine's MLX work happens.

MLX streams and lazy arrays belong to the thread that made them, and `anyio.to_thread` is not pinned, so each engine has
a thread of its own with a queue in. Jobs run in order. A job that raises ends the thread: `on_death` is told, and
later jobs are refused. Results leave through whatever the job itself calls (`loop.call_soon_threadsafe`).
"""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class ThreadEnded(RuntimeError):
    """The thread has ended and takes no more jobs."""


class MlxThread:
    """A pinned thread with a FIFO of jobs.

    Args:
        name: for debuggers and logs.
        on_death: called on the thread, once, with the exception that ended it. Not called after `close`.
    """

    def __init__(self, name: str = "mlx", on_death: Callable[[BaseException], None] | None = None) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.on_death = on_death
        self._ended = False
        self._abandoned = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether jobs are still taken."""
        return not self._ended and self._thread.is_alive()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job.

        Raises:
            ThreadEnded: the thread has ended.
        """
        if self._ended:
            raise ThreadEnded("the MLX thread has ended")
        self._jobs.put(job)

    def close(self, timeout_s: float | None = None) -> bool:
        """Run what is queued, end, and join. False when it did not end in time (a stuck device)."""
        if not self._ended:
            self._jobs.put(None)
        if self._abandoned:
            return not self._thread.is_alive()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Take no more jobs and never wait for the one that hangs: a thread cannot be ended from outside."""
        self._abandoned = self._ended = True
        self.on_death = None
        self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self._ended = True
                logger.exception("a job on the MLX thread failed")
                if self.on_death is not None:
                    self.on_death(error)
                return
            del job  # keep no reference to its arrays while waiting
        self._ended = True
