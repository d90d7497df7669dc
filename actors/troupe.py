"""The troupe: runs the six actors of one engine in one task group, and answers for them.

When an actor dies the others are stopped, every live request ends with the error, and `on_failure` is told; `run` then
returns. Stopping (cancelling `run`) ends what is left with "the runtime was stopped".
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import anyio
from anyio import TASK_STATUS_IGNORED

from ..runtime.actor import InboxFull, Reply
from ..runtime.clock import MonotonicClock
from ..runtime.errors import ActorDied, EngineFailed, InvalidRequest, NotReady, Overloaded, TroupeError
from ..runtime.messages import admission as to_admission
from ..runtime.messages import cache_store as to_cache
from ..runtime.messages import memory_enforcer as to_memory
from ..runtime.messages import prefill as to_prefill
from ..runtime.service import ActorStatistics, MemoryStatus, Statistics
from .casting import cast_for
from .progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskStatus

    from ..runtime.actor import Actor, Ref
    from ..runtime.clock import Clock
    from ..runtime.config import RuntimeConfig
    from ..runtime.engine_protocol import Engine, EngineFacts
    from ..runtime.messages.admission import AdmissionMessage
    from ..runtime.peers import Peer
    from ..runtime.request import Request
    from ..runtime.tracing import Tracer
    from .cache_disk import CacheDisk
    from .executor import JobThread

logger = logging.getLogger(__name__)

TICK_S = 0.25


class Troupe:
    """All actors of one engine. Built and used on the event loop's thread.

    Args:
        config: the settings.
        facts: what the engine said of itself when it was loaded.
        engine: only ever called on `thread`.
        thread: runs the engine's jobs; the caller ends it, after `run` has returned.
        clock: time for all actors.
        on_failure: called once with the error when an actor dies.
        tick_s: interval at which deadlines and memory are looked at; None leaves that to calls of `tick`.
        footprint: bytes of the process; psutil's when None.
        disk: the prefix cache's disk tier; None is RAM only.
        tracer: records the messages that actors handle, if there is one.
        peer: this engine among the others of its process; None when there are no others.

    Attributes:
        cast: the actors.
        failure: why the troupe ended by itself; None while it lives.
        ended: set when `run` has ended.
        row_limit_tokens: the longest row that memory can ever serve; None when it is no bound, or not known.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        facts: EngineFacts,
        engine: Engine,
        thread: JobThread,
        *,
        clock: Clock | None = None,
        on_failure: Callable[[TroupeError], None] | None = None,
        tick_s: float | None = TICK_S,
        footprint: Callable[[], int] | None = None,
        disk: CacheDisk | None = None,
        tracer: Tracer | None = None,
        peer: Peer | None = None,
    ) -> None:
        clock = clock or MonotonicClock()
        self.failure: TroupeError | None = None
        self.ended = anyio.Event()
        self.cast = cast_for(config, facts, engine, thread, clock, footprint, disk, peer)
        for actor in self.cast:
            actor.tracer = tracer
        self._on_failure = on_failure
        self.row_limit_tokens = self._row_limit(facts.context_length)
        self._tick_s = tick_s
        self._running = False
        self._progress = Progress(self.cast, config.hang_timeout_s, TICK_S, clock)

    @property
    def admission(self) -> Ref[AdmissionMessage]:
        """Where requests go in."""
        return self.cast.admission.ref

    def check_memory(self, tokens: int, param: str = "prompt") -> None:
        """Raise InvalidRequest when a row of so many tokens could never be served, whoever else is there."""
        ledger = self.cast.admission.core.ledger
        if self.row_limit_tokens is None or ledger is None or tokens <= self.row_limit_tokens:
            return
        limits = self.cast.memory_enforcer.limits
        raise InvalidRequest(
            f"{tokens} tokens need about {ledger.alone_bytes(tokens) >> 20} MiB of memory; "
            f"{limits.stable_admission_bytes >> 20} MiB may be planned with ({limits.stable_binding}), which is enough "
            f"for {self.row_limit_tokens} tokens of prompt and output: {limits.stable_remedy}",
            param=param,
            code="memory_limit_exceeded",
        )

    @property
    def last_step_age_s(self) -> float | None:
        """How long the oldest job has been on the engine's thread; None when it has nothing to do."""
        return self.cast.executor.last_step_age_s

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled, or until an actor dies. Never raises an actor's error: see `failure`."""
        self._running = True
        try:
            async with anyio.create_task_group() as group:
                for actor in self.cast:
                    group.start_soon(self._serve, actor, group.cancel_scope, name=actor.name)
                if self._tick_s is not None:
                    group.start_soon(self._keep_ticking, self._tick_s, name="ticks")
                task_status.started()
        finally:
            self._running = False
            self.ended.set()
            self._end_requests(self.failure or NotReady("the runtime was stopped", code="stopped"))

    async def submit(self, rows: tuple[Request, ...]) -> None:
        """Queue the rows of one request, which share one prompt; the first is the leader.

        Raises:
            NotReady: the troupe is not running, or is draining.
            Overloaded: the queue is full.
            InvalidRequest: the request id is taken, or there are more rows than there can be.
        """
        await self._ask(lambda reply: to_admission.Submit(rows, reply))

    async def drain(self) -> None:
        """Refuse new requests from now on, and wait until the last row has ended."""
        await self._ask(to_admission.Drain)

    async def cache_opened(self) -> None:
        """Wait until the prefix cache knows what its disk holds."""
        await self.cast.cache_store.opened.wait()

    async def flush_cache(self) -> None:
        """Bring to disk what the prefix cache has in RAM only; returns when that is done, or cannot be."""
        if not self._running:
            return
        reply: Reply[None] = Reply()
        try:
            self.cast.cache_store.ref.tell(to_cache.Flush(reply))
            await reply
        except (ActorDied, InboxFull) as error:
            logger.warning("the prefix cache was not flushed: %s", error)

    def cancel(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""
        if not self._running:
            return
        try:
            self.admission.tell(to_admission.Cancel(request_id))
        except InboxFull:  # a cancel must not be lost: once more when admission has had its turn
            asyncio.get_running_loop().call_soon(self.cancel, request_id)
        except ActorDied:
            logger.debug("a cancel came after the end")

    def tick(self) -> None:
        """Have deadlines and memory looked at."""
        self.admission.tell(to_admission.Tick())
        self.cast.prefill.ref.tell(to_prefill.Tick())
        self.cast.memory_enforcer.ref.tell(to_memory.Tick())
        self.cast.cache_store.ref.tell(to_cache.Tick())
        if (still_s := self._progress.ended_s()) is not None:
            self.thread_died(EngineFailed(f"requests have waited for {still_s:.0f} s and nothing has moved"))

    def thread_died(self, error: BaseException) -> None:
        """The engine's thread has ended by an exception. May be called from any thread."""
        self.cast.executor.thread_died(error)

    def memory(self) -> MemoryStatus:
        """Usage and lines."""
        enforcer = self.cast.memory_enforcer
        sample, limits = enforcer.sample, enforcer.limits
        return MemoryStatus(
            active_bytes=sample.active_bytes,
            pool_bytes=sample.pool_bytes,
            peak_bytes=sample.peak_bytes,
            sample_age_s=enforcer.clock.now() - sample.read_s,
            footprint_bytes=enforcer.footprint_bytes,
            base_bytes=enforcer.base_bytes,
            admission_bytes=limits.admission_bytes,
            dynamic_bytes=limits.dynamic_bytes,
            preempt_bytes=limits.preempt_bytes,
            abort_bytes=limits.abort_bytes,
            binding=limits.binding,
            remedy=limits.remedy,
            row_limit_tokens=self.row_limit_tokens,
            guarded=self.cast.admission.core.ledger is not None,
        )

    def statistics(self) -> Statistics:
        """A snapshot."""
        cast = self.cast
        admission, prefill, decode = cast.admission.core, cast.prefill.core, cast.decode.core
        cache, sample = cast.cache_store.core, cast.memory_enforcer.sample
        return Statistics(
            running=decode.running,
            prefilling=prefill.prefilling,
            waiting=admission.waiting,
            steps=decode.steps,
            prompt_tokens=prefill.prompt_tokens,
            completion_tokens=decode.completion_tokens,
            finished=dict(admission.finished),
            cache=cache.statistics(),
            memory_active_bytes=sample.active_bytes,
            memory_pool_bytes=sample.pool_bytes,
            memory_peak_bytes=sample.peak_bytes,
            last_step_age_s=self.last_step_age_s,
            requeued=admission.requeued,
            preempted=decode.preempted,
            chunks=prefill.chunks,
            throttled_chunks=prefill.throttled_chunks,
            crowded_chunks=prefill.hold.crowded,
            holds=dict(admission.holds),
            actors={
                actor.name: ActorStatistics(actor.depth, actor.stats.handled, actor.stats.busy_s) for actor in self.cast
            },
        )

    def _row_limit(self, context_length: int) -> int | None:
        ledger, limits = self.cast.admission.core.ledger, self.cast.memory_enforcer.limits
        if ledger is None:
            return None
        longest = ledger.row_limit(context_length, limits.stable_admission_bytes)
        return None if longest >= context_length else longest

    async def _serve(self, actor: Actor[Any], scope: anyio.CancelScope) -> None:
        try:
            await actor.run()
        except Exception as error:
            self._fail(actor, error)
            scope.cancel()

    def _fail(self, actor: Actor[Any], error: Exception) -> None:
        """The first death counts; those that follow from it do not."""
        if self.failure is not None:
            return
        self._running = False
        failure = error if isinstance(error, TroupeError) else ActorDied(f"{actor.name} failed: {error!r}")
        self.failure = failure
        self._end_requests(failure)
        if self._on_failure is not None:
            self._on_failure(failure)

    def _end_requests(self, error: TroupeError) -> None:
        """End every live request; admission knows them all, whichever actor has them."""
        self.cast.admission.core.fail_all(error)

    async def _keep_ticking(self, interval_s: float) -> None:
        while True:
            await anyio.sleep(interval_s)
            try:
                self.tick()
            except ActorDied:
                return

    async def _ask(self, make: Callable[[Reply[None]], AdmissionMessage]) -> None:
        if not self._running:
            raise NotReady(str(self.failure or "the runtime is not running"))
        reply: Reply[None] = Reply()
        try:
            self.admission.tell(make(reply))
            await reply
        except InboxFull as error:
            raise Overloaded(str(error)) from None
        except ActorDied as error:
            raise NotReady(error.message) from None
