"""The embedding facade: one served model in this process.

    async with Runtime(model="demo") as runtime:
        answer = await runtime.complete(Generation(prompt="Once upon a time"))

Belongs to the event loop it was entered on. Several runtimes may live in one process, each with its own MLX thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import msgspec

from .answer import completion_of
from .clock import MonotonicClock
from .config import RuntimeConfig
from .embedding import embed
from .errors import (
    ActorDied,
    ContextLengthExceeded,
    InvalidRequest,
    NotReady,
    TroupeError,
)
from .event_stream import EventStream
from .generation import MAX_CHOICES, MAX_STOPS, Generation
from .metrics import RuntimeMetrics
from .output.events import EventSplitter
from .prefix_cache import namespace, read_warm_prompts
from .reading import PromptReading
from .request import Request
from .request_stream import RequestStream
from .sampling_params import MAX_TOP_LOGPROBS, check_token_ids
from .service import Readiness, Statistics, Status
from .supervisor import Supervisor
from .tracing import open_tracer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from types import TracebackType

    from anyio.abc import TaskGroup

    from ..actors.troupe import Troupe
    from .clock import Clock
    from .event_stream import Mailbox
    from .generation import Completion, EmbeddingQuery, Embeddings, ModelInfo
    from .loading import LoadedEngine
    from .models.progress import Report
    from .output import Prepared
    from .peers import Peer
    from .text import TextService

logger = logging.getLogger(__name__)

CACHE_OPEN_S = 10.0
"""A disk that is slower to say what it holds says it while requests are served."""


class OpenRequest:
    """An accepted request whose events go to a mailbox.

    Attributes:
        request_id: the caller's, or made up.
        prompt_tokens: how many tokens the prompt has.
        splitter: takes its events apart; None where they stay as they are.
    """

    def __init__(self, rows: list[Request], splitter: EventSplitter | None, cancel: Callable[[str], None]) -> None:
        self.request_id = rows[0].request_id
        self.prompt_tokens = len(rows[0].prompt)
        self.splitter = splitter
        self._rows = rows
        self._cancel = cancel

    def close(self) -> None:
        """Cancel it, unless it has ended."""
        if any(not row.finished for row in self._rows):
            self._cancel(self.request_id)


class Runtime:
    """A served model: `async with` loads it and runs its actors; leaving ends every request and frees it.

    Args:
        config: settings; keyword arguments override its fields (`Runtime(model="demo", max_rows=8)`).
        clock: for tests.
        progress: hears of downloads and conversions, and of weights that are loaded.
        peer: this engine among the others of the process, if it belongs to a pool.
    """

    def __init__(
        self,
        config: RuntimeConfig | None = None,
        *,
        clock: Clock | None = None,
        progress: Report | None = None,
        peer: Peer | None = None,
        **settings: object,
    ) -> None:
        self.config = msgspec.structs.replace(config or RuntimeConfig(), **settings)
        self._clock: Clock = clock or MonotonicClock()
        self.tracer = open_tracer(self.config.trace)
        self._supervisor = Supervisor(
            self.config, self._clock, progress=progress, on_failure=self._fail, tracer=self.tracer, peer=peer
        )
        self._group: TaskGroup | None = None
        self._metrics: RuntimeMetrics | None = None
        self._live: dict[int, Request] = {}
        self._finished: dict[str, int] = {}
        self._next_row = 0
        self._draining = False
        self._opened = False
        self._random = random.SystemRandom()

    # --- life -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Runtime:
        supervisor = self._supervisor
        await supervisor.load()
        assert supervisor.loaded is not None
        try:
            group = anyio.create_task_group()
            await group.__aenter__()
        except BaseException:
            await supervisor.free()
            raise
        self._group = group
        self._metrics = RuntimeMetrics(supervisor.loaded.info.name, self.statistics)
        await group.start(supervisor.serve)
        self._metrics.loaded(supervisor.load_s)
        try:
            with anyio.move_on_after(CACHE_OPEN_S):
                if supervisor.troupe is not None:
                    await supervisor.troupe.cache_opened()
            await self._warm()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        self._opened = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._draining = True
        self._end_all(NotReady("the server is shutting down; try again later", code="shutting_down"))
        group, self._group = self._group, None
        try:
            await self._flush()
            if group is not None:
                group.cancel_scope.cancel()
                await group.__aexit__(None, None, None)
        finally:
            await self._supervisor.free()
            if self.tracer is not None:
                self.tracer.close()

    async def _flush(self) -> None:
        """Let the prefix cache finish its writing, for a while."""
        troupe = self._supervisor.troupe
        if troupe is None or not self.config.cache_disk_bytes:
            return
        with anyio.move_on_after(self.config.cache_flush_timeout_s, shield=True):
            await troupe.flush_cache()

    async def _warm(self) -> None:
        """Compute the prefixes of the warm-up file, one after the other."""
        if not self.config.warm_prompts:
            return
        prefixes = await read_warm_prompts(self.config.warm_prompts)
        for generation in prefixes:
            await self.complete(generation)
        logger.info("prefix cache: %d prefixes warm", len(prefixes))

    def _fail(self, error: TroupeError) -> None:
        """An actor or the MLX thread died: what is alive ends here; the supervisor sees to the rest."""
        self._end_all(ActorDied(f"the engine failed: {error}; it is being started anew, try again"))

    def _end_all(self, error: TroupeError) -> None:
        for request in list(self._live.values()):
            request.fail(error, self._clock.now())

    async def drain(self, timeout_s: float) -> None:
        """See `Service.drain`."""
        self._draining = True
        troupe = self._supervisor.troupe
        if troupe is None or troupe.failure is not None:
            return
        with anyio.move_on_after(timeout_s), contextlib.suppress(NotReady):
            await troupe.drain()
        if not self._live:
            return
        late = {request.request_id for request in self._live.values()}
        self._end_all(NotReady("the server is shutting down; try again later", code="shutting_down"))
        for request_id in late:
            self.cancel(request_id)

    # --- requests -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def stream(self, generation: Generation) -> AsyncIterator[RequestStream]:
        """See `Service.stream`."""
        events = EventStream(choices=generation.n, bound=self.config.event_buffer)
        opened = await self.open(generation, events)
        try:
            yield RequestStream(opened.request_id, opened.prompt_tokens, events, opened.splitter)
        finally:
            opened.close()

    async def open(self, generation: Generation, events: Mailbox) -> OpenRequest:
        """Submit a request whose events go to `events`, unsplit, perhaps before this returns.

        Whoever opens it closes it. Raises what `Service.stream` raises.
        """
        try:
            rows, prepared = await self._submit(generation, events)
        except TroupeError as error:
            if self._metrics is not None:
                self._metrics.refused(error.code)
            raise
        new_splitter = prepared.new_splitter
        splitter = None if new_splitter is None else EventSplitter([new_splitter() for _ in rows])
        return OpenRequest(rows, splitter, self.cancel)

    async def complete(self, generation: Generation) -> Completion:
        """See `Service.complete`."""
        async with self.stream(generation) as source:
            return await completion_of(source, generation.n, self.model.name)

    async def embed(self, query: EmbeddingQuery) -> Embeddings:
        """See `Service.embed`."""
        loaded, _ = self._require()
        if not loaded.facts.embeds:
            raise InvalidRequest("this model's hidden states cannot be had, so it makes no embeddings", param="model")
        return await embed(self, query, loaded.pooling)

    def cancel(self, request_id: str) -> None:
        """See `Service.cancel`."""
        if self._supervisor.troupe is not None:
            self._supervisor.troupe.cancel(request_id)

    async def _submit(self, generation: Generation, events: Mailbox) -> tuple[list[Request], Prepared]:
        loaded, troupe = self._require()
        arrived_s = self._clock.now()
        _check(generation)
        generation.sampling.check(loaded.facts.vocab_size)
        check_token_ids(generation.stop_token_ids, loaded.input_ids, "stop_token_ids")
        prompt = await self._prompt(generation, loaded)
        max_tokens = self._max_tokens(generation, len(prompt), loaded, troupe)
        prepared = await loaded.outputs.prepare(generation, prompt)
        rows = self._rows(generation, prompt, max_tokens, events, loaded, arrived_s, prepared)
        try:
            await troupe.submit(tuple(rows))
        except asyncio.CancelledError:
            self.cancel(rows[0].request_id)  # it may be queued already, with nobody to listen
            raise
        self._live.update({row.row: row for row in rows if not row.finished})
        return rows, prepared

    def _require(self) -> tuple[LoadedEngine, Troupe]:
        supervisor, readiness = self._supervisor, self._engine_readiness()
        serving = readiness.ready or readiness.reason == "stalled"
        if supervisor.loaded is None or supervisor.troupe is None or not serving:
            raise NotReady(
                f"the model is not being served: {readiness.reason} {readiness.detail}".rstrip(),
                retry_after_s=max(1.0, math.ceil(supervisor.load_s)),
            )
        return supervisor.loaded, supervisor.troupe

    async def _prompt(self, generation: Generation, loaded: LoadedEngine) -> list[int]:
        if generation.tokens is not None:
            prompt = list(generation.tokens)
        elif generation.prompt is not None:
            prompt = await loaded.text.encode(generation.prompt)
        else:
            prompt = await loaded.text.render_chat(
                generation.messages or (),
                add_generation_prompt=not generation.continue_final_message,
                continue_final_message=generation.continue_final_message,
                tools=generation.tools,
                template_args=generation.template_args,
            )
        name = "messages" if generation.messages is not None else "prompt"
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", param=name)
        check_token_ids(prompt, loaded.input_ids, name)
        return prompt

    def _max_tokens(self, generation: Generation, prompt_tokens: int, loaded: LoadedEngine, troupe: Troupe) -> int:
        room = loaded.facts.context_length - prompt_tokens
        wanted = generation.max_tokens
        if room < (wanted if wanted is not None else 1):
            asked = f" and {wanted} of output" if wanted is not None else ""
            raise ContextLengthExceeded(
                f"this model's context is {loaded.facts.context_length} tokens; the request has {prompt_tokens} of "
                f"prompt{asked}. Shorten one of them.",
                param="messages" if generation.messages is not None else "prompt",
            )
        troupe.check_memory(prompt_tokens + (wanted or 1), "prompt" if generation.messages is None else "messages")
        if wanted is not None:
            return wanted
        if troupe.row_limit_tokens is not None:
            room = min(room, troupe.row_limit_tokens - prompt_tokens)
        return min(room, self.config.max_tokens_default or room)

    def _rows(
        self,
        generation: Generation,
        prompt: list[int],
        max_tokens: int,
        events: Mailbox,
        loaded: LoadedEngine,
        arrived_s: float,
        prepared: Prepared,
    ) -> list[Request]:
        request_id = generation.request_id or uuid.uuid4().hex
        stops = frozenset(generation.stop_token_ids) | (frozenset() if generation.ignore_eos else loaded.end_ids)
        seed = generation.sampling.seed
        first_seed = self._random.getrandbits(63) if seed is None else seed
        chat = generation.messages is not None
        turn_start = loaded.turns.turn_start(prompt) if chat else None
        shared = namespace(self.config, generation)
        skip = loaded.text.special_token_ids - prepared.shown if prepared.shown else None
        leader = self._next_row
        self._next_row += generation.n
        return [
            Request(
                row=leader + index,
                request_id=request_id,
                index=index,
                leader=leader,
                prompt=prompt,
                sampling=msgspec.structs.replace(generation.sampling, seed=first_seed + index),
                max_tokens=max_tokens,
                min_tokens=generation.min_tokens,
                stop_tokens=stops,
                text=loaded.text.open_stream(
                    stop=generation.stop, skip=skip, text_start=generation.messages is not None
                ),
                events=events,
                arrived_s=arrived_s,
                deadline_s=None if generation.timeout_s is None else arrived_s + generation.timeout_s,
                priority=generation.priority,
                cache=generation.cache,
                namespace=shared,
                turn_start=turn_start,
                reasoning=loaded.turns.dropped_reasoning if chat else (),
                constraint=prepared.constraints[index],
                reading=_reading(generation),
                on_end=self._ended,
                gaps=self._metrics.gaps if self._metrics is not None else None,
            )
            for index in range(generation.n)
        ]

    def _ended(self, request: Request) -> None:
        self._live.pop(request.row, None)
        reason = str(request.finish_reason)
        self._finished[reason] = self._finished.get(reason, 0) + 1
        if self._metrics is not None:
            self._metrics.ended(request)
        if self.tracer is not None:
            self.tracer.request_ended(request, self._clock.now())

    # --- the rest -------------------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo:
        """See `Service.model`."""
        return self._require_loaded().info

    def _require_loaded(self) -> LoadedEngine:
        if self._supervisor.loaded is None:
            raise NotReady("the model is still loading; ask /readyz")
        return self._supervisor.loaded

    def _text(self) -> TextService:
        return self._require_loaded().text

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Service.tokenize`."""
        return await self._text().encode(text, add_special_tokens=add_special_tokens)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """See `Service.detokenize`."""
        return await self._text().decode(tokens)

    async def count_tokens(self, generation: Generation) -> int:
        """See `Service.count_tokens`."""
        return len(await self._prompt(generation, self._require()[0]))

    def token_text(self, token: int) -> tuple[str, bytes]:
        """See `Service.token_text`."""
        return self._text().token_text(token)

    def readiness(self) -> Readiness:
        """See `Service.readiness`. Green once the prefixes on disk are known and those of the warm-up are computed."""
        readiness = self._engine_readiness()
        return Readiness(False, "loading", "prefixes") if readiness.ready and not self._opened else readiness

    def _engine_readiness(self) -> Readiness:
        supervisor = self._supervisor
        if supervisor.failure is not None:
            return Readiness(False, "failed", supervisor.failure)
        if self._draining:
            return Readiness(False, "draining")
        troupe = supervisor.troupe
        if troupe is None or troupe.failure is not None:
            trouble = supervisor.trouble or (None if troupe is None else str(troupe.failure))
            return Readiness(False, "loading") if trouble is None else Readiness(False, "restarting", trouble)
        age_s = troupe.last_step_age_s
        if age_s is not None and age_s > self.config.step_timeout_s:
            return Readiness(False, "stalled", f"a step has run for {age_s:.0f} s")
        return Readiness(True)

    def statistics(self) -> Statistics:
        """A snapshot; cheap."""
        supervisor = self._supervisor
        if supervisor.troupe is None:
            return Statistics(
                running=0,
                prefilling=0,
                waiting=0,
                steps=0,
                prompt_tokens=0,
                completion_tokens=0,
                finished=dict(self._finished),
                restarts=supervisor.restarts,
            )
        return msgspec.structs.replace(
            supervisor.troupe.statistics(), finished=dict(self._finished), restarts=supervisor.restarts
        )

    async def status(self) -> Status:
        """See `Service.status`."""
        supervisor = self._supervisor
        return Status(
            model="" if supervisor.loaded is None else supervisor.loaded.info.name,
            readiness=self.readiness(),
            statistics=self.statistics(),
            memory=None if supervisor.troupe is None else supervisor.troupe.memory(),
        )

    async def metrics(self) -> bytes:
        """See `Service.metrics`."""
        return b"" if self._metrics is None else self._metrics.exposition()


def _check(generation: Generation) -> None:
    given = [name for name in ("messages", "prompt", "tokens") if getattr(generation, name) is not None]
    if len(given) != 1:
        raise InvalidRequest("give exactly one of messages, prompt and tokens", param=given[-1] if given else "prompt")
    if not 1 <= generation.n <= MAX_CHOICES:
        raise InvalidRequest(f"n must be 1 to {MAX_CHOICES}", param="n")
    if generation.max_tokens is not None and generation.max_tokens < 0:
        raise InvalidRequest("max_tokens must not be negative", param="max_tokens")
    if generation.embed is not None and (generation.max_tokens != 0 or generation.prompt_logprobs is not None):
        raise InvalidRequest("an embedding takes max_tokens 0 and no log-probabilities", param="max_tokens")
    if generation.prompt_logprobs is not None and not 0 <= generation.prompt_logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"prompt_logprobs must be in [0, {MAX_TOP_LOGPROBS}]", param="prompt_logprobs")
    if generation.min_tokens < 0:
        raise InvalidRequest("min_tokens must not be negative", param="min_tokens")
    if generation.max_tokens is not None and generation.min_tokens > generation.max_tokens:
        raise InvalidRequest("min_tokens must not exceed max_tokens", param="min_tokens")
    if len(generation.stop) > MAX_STOPS:
        raise InvalidRequest(f"at most {MAX_STOPS} stop strings", param="stop")
    if generation.timeout_s is not None and not generation.timeout_s > 0:
        raise InvalidRequest("timeout must be positive", param="timeout")


def _reading(generation: Generation) -> PromptReading | None:
    if generation.embed is None and generation.prompt_logprobs is None:
        return None
    return PromptReading(generation.prompt_logprobs, generation.embed)
