"""A `Service` whose model is served by another process.

    async with RemoteRuntime(config, start=lambda: start_child(command)) as runtime:
        answer = await runtime.complete(Generation(prompt="Once upon a time"))

It imports no MLX. What the engine process fails at is handled there, by its own supervisor; when the process itself
dies, or its event loop stands still, it is ended and started anew, `restart_limit` times within ten minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import msgspec

from ..answer import completion_of
from ..clock import MonotonicClock
from ..errors import EngineFailed, NotReady, TroupeError
from ..generation import Embeddings
from ..request_stream import RequestStream
from ..restarts import RestartBudget
from ..service import Readiness, Statistics, Status
from .session import Session
from .to_engine import AskMetrics, AskStatus, CountTokens, Detokenize, Drain, Embed, Hello, Tokenize, wire_version
from .words import KnownWords

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType

    from anyio.abc import TaskGroup

    from ..clock import Clock
    from ..config import RuntimeConfig
    from ..generation import Completion, EmbeddingQuery, Generation, ModelInfo
    from ..models.progress import Report
    from .child import Engine

logger = logging.getLogger(__name__)

WATCH_S = 1.0
ASK_S = 3.0
"""Longest an operator's question waits for a busy engine process."""
STOP_S = 45.0
"""Longest a stop takes, besides what the prefix cache may take to write."""
FORCED_STOP_S = 5.0
REAP_S = 10.0
DRAIN_SLACK_S = 5.0


class RemoteRuntime:
    """See the module. Belongs to the event loop it was entered on.

    Args:
        config: settings of the runtime over there.
        start: starts an engine process. Raises TroupeError.
        progress: hears of downloads and conversions.
        clock: of restarts.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        *,
        start: Callable[[], Engine],
        progress: Report | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self._start_engine = start
        self._progress = progress
        self._budget = RestartBudget(config.restart_limit, clock or MonotonicClock())
        self._words = KnownWords()
        self._engine: Engine | None = None
        self._session: Session | None = None
        self._group: TaskGroup | None = None
        self._status: Status | None = None
        self._restarts = 0
        self._load_s = 0.0
        self._silent_s = 0.0
        self._draining = False
        self._trouble: str | None = None
        self._failure: str | None = None

    # --- life -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> RemoteRuntime:
        await self._start()
        try:
            group = anyio.create_task_group()
            await group.__aenter__()
        except BaseException:
            await self._end(FORCED_STOP_S)
            raise
        self._group = group
        group.start_soon(self._keep)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._draining = True
        group, self._group = self._group, None
        try:
            if group is not None:
                group.cancel_scope.cancel()
                await group.__aexit__(None, None, None)
        finally:
            await self._end(self.config.cache_flush_timeout_s + STOP_S if kind is None else FORCED_STOP_S)

    async def _start(self) -> None:
        """Start an engine process and have it load. Raises what loading raises, with nothing left behind."""
        self._engine = self._start_engine()
        session = Session(self._words, self._progress, self.config.event_buffer)
        try:
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            await loop.create_unix_connection(lambda: session.link, sock=self._engine.connection)
            self._session = session
            _greet(session, self.config)
            await session.loaded
            self._load_s = loop.time() - began_s
        except BaseException:
            await self._end(FORCED_STOP_S)
            raise
        self._silent_s = 0.0
        self._trouble = None

    async def _end(self, grace_s: float) -> str:
        """End the engine process, with what it does; says how it ended."""
        session, self._session = self._session, None
        engine, self._engine = self._engine, None
        with anyio.CancelScope(shield=True):
            if session is not None:
                session.stop(NotReady("the server is shutting down; try again later", code="shutting_down"))
            how = "" if engine is None else await engine.ended(grace_s)
            if session is not None:
                await session.link.close(FORCED_STOP_S)
        return how

    async def _keep(self) -> None:
        """Start the engine process anew when it ends by itself, until that happens too often."""
        while True:
            await self._watch()
            self._trouble = "the engine process ended"
            self._session, engine, self._engine = None, self._engine, None
            assert engine is not None
            self._trouble = f"the engine process ended: {await engine.ended(REAP_S)}"
            self._budget.failed()
            if not await self._restarted():
                return

    async def _watch(self) -> None:
        """Wait until the connection is gone; kill an engine process that says nothing for `hang_timeout_s`."""
        session = self._session
        assert session is not None
        heard = session.pulses
        while not session.over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await session.over.wait()
            # Counted in turns of this loop: when both processes were stopped for a while, neither is late.
            self._silent_s = self._silent_s + WATCH_S if session.pulses == heard else 0.0
            heard = session.pulses
            if self._silent_s > self.config.hang_timeout_s and self._engine is not None:
                logger.critical("the engine process has said nothing for %.0f s: it is killed", self._silent_s)
                self._engine.kill()

    async def _restarted(self) -> bool:
        """Start anew; False when it failed too often."""
        while not self._budget.spent:
            logger.error("the engine process is started anew: %s", self._trouble)
            await anyio.sleep(self._budget.backoff_s)
            try:
                await self._start()
            except (TroupeError, OSError) as error:
                logger.error("the engine process could not be started anew: %s", error)
                self._trouble = str(error)
                self._budget.failed()
                continue
            self._restarts += 1
            return True
        self._failure = self._trouble
        logger.critical("the engine process failed %d times and stays down: %s", self._budget.failures, self._failure)
        return False

    async def drain(self, timeout_s: float) -> None:
        """See `Service.drain`."""
        self._draining = True
        session = self._session
        if session is None or session.over.is_set():
            return
        with contextlib.suppress(TimeoutError, TroupeError):
            await session.call(lambda number: Drain(number, timeout_s), type(None), timeout_s + DRAIN_SLACK_S)

    # --- requests -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def stream(self, generation: Generation) -> AsyncIterator[RequestStream]:
        """See `Service.stream`."""
        async with self._opened(generation, whole=False) as source:
            yield source

    @asynccontextmanager
    async def _opened(self, generation: Generation, *, whole: bool) -> AsyncIterator[RequestStream]:
        session = self._require()
        number, stream = session.open(generation, whole=whole)
        try:
            accepted = await stream.accepted
            yield RequestStream(accepted.request_id, accepted.prompt_tokens, stream.events)
        finally:
            session.close(number)

    async def complete(self, generation: Generation) -> Completion:
        """See `Service.complete`."""
        model = self.model.name
        async with self._opened(generation, whole=True) as source:
            return await completion_of(source, generation.n, model)

    async def embed(self, query: EmbeddingQuery) -> Embeddings:
        """See `Service.embed`."""
        return await self._require().call(lambda number: Embed(number, query), Embeddings)

    def cancel(self, request_id: str) -> None:
        """See `Service.cancel`."""
        if self._session is not None:
            self._session.cancel(request_id)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Service.tokenize`."""
        return await self._loaded().call(lambda number: Tokenize(number, text, add_special_tokens), list[int])

    async def detokenize(self, tokens: list[int]) -> str:
        """See `Service.detokenize`."""
        return await self._loaded().call(lambda number: Detokenize(number, tokens), str)

    async def count_tokens(self, generation: Generation) -> int:
        """See `Service.count_tokens`."""
        return await self._require().call(lambda number: CountTokens(number, generation), int)

    def token_text(self, token: int) -> tuple[str, bytes]:
        """See `Service.token_text`. Knows the tokens of events with log-probabilities; LookupError for others."""
        return self._words.text(token)

    # --- what it is and how it does -------------------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo:
        """See `Service.model`."""
        info = None if self._session is None else self._session.info
        if info is None:
            raise NotReady("the model is still loading; ask /readyz")
        return info

    def readiness(self) -> Readiness:
        """See `Service.readiness`."""
        if self._failure is not None:
            return Readiness(ready=False, reason="failed", detail=self._failure)
        if self._draining:
            return Readiness(ready=False, reason="draining")
        session = self._session
        if session is None or not (session.loaded.done() or session.readiness.ready):
            if self._trouble is None:
                return Readiness(ready=False, reason="loading")
            return Readiness(ready=False, reason="restarting", detail=self._trouble)
        if self._silent_s > self.config.step_timeout_s:
            text = f"the engine process has said nothing for {self._silent_s:.0f} s"
            return Readiness(ready=False, reason="stalled", detail=text)
        return session.readiness

    async def status(self) -> Status:
        """See `Service.status`. The last one known, if the engine process does not answer."""
        session = self._session
        if session is not None:
            with contextlib.suppress(TimeoutError, TroupeError):
                self._status = await session.call(AskStatus, Status, ASK_S)
        found = self._status or Status(model="", readiness=self.readiness(), statistics=_NOTHING, memory=None)
        statistics = msgspec.structs.replace(found.statistics, restarts=found.statistics.restarts + self._restarts)
        return msgspec.structs.replace(found, readiness=self.readiness(), statistics=statistics)

    async def metrics(self) -> bytes:
        """See `Service.metrics`; and how often the engine process was started anew."""
        found = b""
        session = self._session
        if session is not None:
            with contextlib.suppress(TimeoutError, TroupeError):
                found = await session.call(AskMetrics, bytes, ASK_S)
        return found + _PROCESS_METRICS % (self._engine is not None, self._restarts)

    def _loaded(self) -> Session:
        """The session, once there is a tokenizer."""
        session = self._session
        if session is None or session.info is None:
            raise NotReady("the model is still loading; ask /readyz")
        return session

    def _require(self) -> Session:
        """The session, if it takes requests."""
        session, readiness = self._session, self.readiness()
        if session is None or session.over.is_set() or not (readiness.ready or readiness.reason == "stalled"):
            raise NotReady(
                f"the model is not being served: {readiness.reason} {readiness.detail}".rstrip(),
                retry_after_s=max(1.0, math.ceil(self._load_s)),
            )
        return session


def _greet(session: Session, config: RuntimeConfig) -> None:
    try:
        session.greet(Hello(wire_version(), config))
    except UnicodeEncodeError:
        raise EngineFailed("a setting is not UTF-8, a path perhaps: set --api-process off, or rename it") from None


_NOTHING = Statistics(running=0, prefilling=0, waiting=0, steps=0, prompt_tokens=0, completion_tokens=0, finished={})
_PROCESS_METRICS = b"""\
# HELP mlx_troupe_engine_process_up The engine process runs.
# TYPE mlx_troupe_engine_process_up gauge
mlx_troupe_engine_process_up %d
# HELP mlx_troupe_engine_process_restarts_total How often the engine process was started anew.
# TYPE mlx_troupe_engine_process_restarts_total counter
mlx_troupe_engine_process_restarts_total %d
"""
