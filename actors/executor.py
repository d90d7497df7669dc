"""The executor actor: puts plans and page orders on the MLX thread, in order, and carries back what the engine says.

It decides nothing. Everything it is told becomes one job on the engine's thread; what the engine emits goes straight to
the inboxes of decode, cache-store and memory-enforcer. The first exception ends the engine: later jobs do not run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar, assert_never

from ..runtime.actor import Actor, InboxFull
from ..runtime.errors import ActorDied, EngineFailed
from ..runtime.messages.cache_store import PageLoaded, PageRead, PagesAdopted, PagesLost
from ..runtime.messages.decode import ExecutorDied
from ..runtime.messages.executor import (
    AdoptPages,
    DropPages,
    EngineRaised,
    ExecutorMessage,
    LoadPage,
    ReadPage,
    SampleMemory,
    SetMemoryLimit,
    StepPlan,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..runtime.actor import Ref
    from ..runtime.clock import Clock
    from ..runtime.engine_protocol import Engine, StepMessage
    from ..runtime.messages.cache_store import CacheStoreMessage
    from ..runtime.messages.decode import DecodeMessage
    from ..runtime.messages.memory_enforcer import MemoryEnforcerMessage

logger = logging.getLogger(__name__)

M = TypeVar("M")


class JobThread(Protocol):
    """A thread that runs jobs one after the other."""

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after those submitted before it. Raises when the thread has ended."""
        ...


class ExecutorActor(Actor[ExecutorMessage]):
    """Owns the line to the engine's thread. Methods marked "MLX thread" run there, all others on the loop.

    Attributes:
        failed: why the engine is gone; None while it lives.
    """

    decode: Ref[DecodeMessage]
    cache_store: Ref[CacheStoreMessage]
    memory_enforcer: Ref[MemoryEnforcerMessage]

    def __init__(self, engine: Engine, thread: JobThread, *, inbox: int, clock: Clock) -> None:
        super().__init__("executor", inbox=inbox, clock=clock)
        self.failed: str | None = None
        self._engine = engine
        self._thread = thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._began_s: deque[float] = deque()  # of the jobs not done; appended on the loop, popped on the MLX thread

    @property
    def last_step_age_s(self) -> float | None:
        """How long the oldest job has been on the thread; None when it has nothing to do."""
        try:
            return self.clock.now() - self._began_s[0]
        except IndexError:
            return None

    async def run(self) -> None:
        """Serve until cancelled, or until the engine fails: then EngineFailed is raised."""
        self._loop = asyncio.get_running_loop()
        await super().run()

    def handle(self, message: ExecutorMessage) -> None:
        """See messages/executor.py."""
        match message:
            case StepPlan():
                self._submit(partial(self._engine.run, message, self._emit))
            case AdoptPages():
                self._submit(partial(self._adopt, message))
            case ReadPage():
                self._submit(partial(self._read, message.page))
            case LoadPage():
                self._submit(partial(self._load, message))
            case DropPages():
                self._submit(partial(self._engine.drop, message.pages))
            case SampleMemory():
                self._submit(partial(self._sample, message))
            case SetMemoryLimit():
                self._submit(partial(self._engine.set_memory_limit, message.limit_bytes))
            case EngineRaised():
                self.failed = self.failed or message.error
                self.decode.tell(ExecutorDied(message.error))
                raise EngineFailed(message.error)
            case _:
                assert_never(message)

    def thread_died(self, error: BaseException) -> None:
        """The thread has ended, with this error. May be called from any thread."""
        self._raised(error)

    def on_death(self, error: ActorDied) -> None:
        """Jobs still on the thread have nobody to answer any more."""
        self.failed = self.failed or error.message

    def _submit(self, work: Callable[[], object]) -> None:
        self._began_s.append(self.clock.now())
        self._thread.submit(partial(self._job, work))

    def _job(self, work: Callable[[], object]) -> None:
        """MLX thread: run one job, unless the engine has failed."""
        try:
            if self.failed is None:
                work()
        except BaseException as error:
            logger.exception("the engine failed")
            self._raised(error)
        finally:
            self._began_s.popleft()

    def _adopt(self, message: AdoptPages) -> None:
        """MLX thread."""
        if missing := self._engine.adopt(message.row, message.pages):
            self._post(self.cache_store, PagesLost(missing))
        self._post(self.cache_store, PagesAdopted(message.store))

    def _read(self, page: int) -> None:
        """MLX thread: the blob's buffers are views of evaluated arrays; they are only read elsewhere."""
        try:
            blob = self._engine.read_page(page)
        except (ValueError, RuntimeError):
            logger.exception("page %d cannot be read", page)
            blob = None
        self._post(self.cache_store, PageRead(page, blob))

    def _load(self, message: LoadPage) -> None:
        """MLX thread."""
        error = None
        try:
            self._engine.load_page(message.page, message.blob)
        except (ValueError, RuntimeError) as failure:
            error = str(failure)
        self._post(self.cache_store, PageLoaded(message.page, error))

    def _sample(self, message: SampleMemory) -> None:
        """MLX thread."""
        self._post(self.memory_enforcer, self._engine.sample_memory(clear_pool=message.clear_pool))

    def _emit(self, message: StepMessage) -> None:
        """MLX thread."""
        self._post(self.decode, message)

    def _raised(self, error: BaseException) -> None:
        """Any thread."""
        self.failed = self.failed or (f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        self._post(self.ref, EngineRaised(self.failed))

    def _post(self, receiver: Ref[M], message: M) -> None:
        """Any thread: put a message into an actor's inbox, on the loop."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        try:
            loop.call_soon_threadsafe(self._tell, receiver, message)
        except RuntimeError:  # the loop closed in between: nobody listens
            logger.debug("a message to %s found the loop closed", receiver.name)

    def _tell(self, receiver: Ref[M], message: M) -> None:
        try:
            receiver.tell(message)
        except ActorDied:
            logger.debug("a message to %s came after its end", receiver.name)
        except InboxFull as error:
            logger.critical("the engine's answer was lost: %s", error)
            if receiver is not self.ref:
                self._raised(error)
