"""A few threads of our own for work that would stall the event loop, each with its own copy of something.

Why not anyio's or asyncio's pool: theirs are shared with file and name look-ups, have no bounded queue, and
keep no object for each thread (Hugging Face tokenizers fail with "Already borrowed" when threads share one).

Invariants (each has a test of its name):
- `long_jobs_leave_a_thread`: of two threads or more, long jobs never hold all; else first come, first served.
- `full_queue_refuses`: at most `max_queued` jobs wait, the next one gets Overloaded.
- `cancelled_job_is_skipped`: a job whose caller left before its turn is never run, and takes no place.
- `close_answers_everyone`: waiting jobs get NotReady, running ones end, no thread is left.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..errors import NotReady, Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..tracing import Tracer

S = TypeVar("S")
R = TypeVar("R")


class _Job(Generic[S, R]):
    """One call, and where its answer goes."""

    __slots__ = ("call", "future", "long")

    def __init__(self, call: Callable[[S], R], *, long: bool) -> None:
        self.call = call
        self.long = long
        self.future: Future[R] = Future()

    def run(self, state: S) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.call(state)
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class WorkerPool(Generic[S]):
    """Threads that run jobs on a state each. `run` belongs to an event loop; any thread may call `close`."""

    def __init__(
        self,
        prepare: Callable[[], S],
        *,
        threads: int,
        max_queued: int,
        name: str,
        tracer: Tracer | None = None,
    ) -> None:
        """Start the threads and wait until each has its state.

        Args:
            prepare: makes one thread's state; called once on each thread, never twice at the same time.
            threads: how many, at least 1.
            max_queued: jobs that may wait for a thread.
            name: prefix of the threads' names.
            tracer: records the jobs, if there is one.

        Raises:
            Exception: the first that `prepare` raised; no thread is left then.
        """
        self._prepare = prepare
        self._tracer = tracer
        self._preparing = threading.Lock()
        self._max_queued = max_queued
        self._max_long = max(1, threads - 1)
        self._long_running = 0
        self._queue: deque[_Job[S, Any]] = deque()
        self._closed = False
        self._changed = threading.Condition()
        ready: list[Future[None]] = [Future() for _ in range(threads)]
        # Daemons, so that a service nobody closed does not keep the process from ending.
        self._threads = [
            threading.Thread(target=self._work, args=(one,), name=f"{name}-{index}", daemon=True)
            for index, one in enumerate(ready)
        ]
        self._start(ready)

    async def run(self, call: Callable[[S], R], *, long: bool = False) -> R:
        """Run `call` with a thread's state. Cancelling this drops the job, or its result if it already runs.

        Args:
            call: what to do.
            long: it may take long enough to matter to jobs behind it.

        Raises:
            Overloaded: `max_queued` jobs wait already.
            NotReady: the pool is closed, before or while the job waited.
            Exception: whatever `call` raised.
        """
        job = _Job(call, long=long)
        self._submit(job)
        return await asyncio.wrap_future(job.future)

    def close(self) -> None:
        """Fail the waiting jobs, let the running ones end, join the threads. A second call does nothing."""
        with self._changed:
            self._closed = True
            waiting = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for job in waiting:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(NotReady("the text service is closed"))
        for thread in self._threads:
            thread.join()

    def _start(self, ready: list[Future[None]]) -> None:
        for thread in self._threads:
            thread.start()
        try:
            for one in ready:
                one.result()
        except BaseException:
            self.close()
            raise

    def _submit(self, job: _Job[S, R]) -> None:
        with self._changed:
            if self._closed:
                raise NotReady("the text service is closed")
            if len(self._queue) >= self._max_queued:
                self._queue = deque(waiting for waiting in self._queue if not waiting.future.cancelled())
            if len(self._queue) >= self._max_queued:
                raise Overloaded(f"{self._max_queued} texts already wait for the tokenizer")
            self._queue.append(job)
            self._changed.notify()

    def _work(self, ready: Future[None]) -> None:
        try:
            with self._preparing:
                state = self._prepare()
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(None)
        while (job := self._take()) is not None:
            if self._tracer is None:
                job.run(state)
            else:
                with self._tracer.span(job.call.__qualname__.partition(".<locals>")[0]):
                    job.run(state)
            self._settle(job)
            del job  # an idle thread must not keep the last text alive

    def _take(self) -> _Job[S, Any] | None:
        """The next job this thread may run; None once the pool is closed."""
        with self._changed:
            while not self._closed:
                for index, job in enumerate(self._queue):
                    if not job.long or self._long_running < self._max_long:
                        del self._queue[index]
                        self._long_running += job.long
                        return job
                self._changed.wait()
            return None

    def _settle(self, job: _Job[S, R]) -> None:
        if job.long:
            with self._changed:
                self._long_running -= 1
                self._changed.notify()
