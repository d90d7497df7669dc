"""A Service without a model: it plays scripts and remembers what it was asked.

A script is a list of what happens to one request: events (alone, or a list of them handed out at once), `Gate`s to wait
at until the test opens them, and exceptions to raise.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np

from mlx_troupe.runtime.embedding import unit
from mlx_troupe.runtime.errors import (
    EngineFailed,
    InvalidRequest,
    NotReady,
    Overloaded,
    RequestTimedOut,
    TroupeError,
)
from mlx_troupe.runtime.events import (
    Event,
    Failed,
    Finished,
    PositionLogprobs,
    PromptLogprobs,
    TextDelta,
    TokenLogprob,
    Usage,
)
from mlx_troupe.runtime.generation import Choice, Completion, EmbeddingQuery, Embeddings, Generation, ModelInfo
from mlx_troupe.runtime.sampling_params import check_token_ids
from mlx_troupe.runtime.service import Readiness, Statistics, Status

Script = list[Event | list[Event] | asyncio.Event | Exception]
WORDS = ("Hello", ",", " wörld", "!")
VOCAB_SIZE = 1000

Gate = asyncio.Event


def prompt_length(generation: Generation) -> int:
    if generation.tokens is not None:
        return len(generation.tokens)
    if generation.prompt is not None:
        return len(generation.prompt)
    return sum(len(message["content"]) for message in generation.messages or ())


def position(generation: Generation, token: int) -> tuple[PositionLogprobs, ...] | None:
    top = generation.sampling.top_logprobs
    if top is None:
        return None
    best = tuple(TokenLogprob(token + place, -0.5 - place) for place in range(top))
    return (PositionLogprobs(TokenLogprob(token, -0.5), best),)


def prompt_logprobs(generation: Generation) -> Script:
    """One a choice, when asked: the prompt's tokens are its letters, or what was sent."""
    if generation.prompt_logprobs is None:
        return []
    tokens = generation.tokens or tuple(ord(letter) % VOCAB_SIZE for letter in generation.prompt or "")
    entries = tuple(entry for token in tokens[1:] for entry in position(generation, token) or ())
    return [PromptLogprobs(tokens, entries, index) for index in range(generation.n)]


def hello(generation: Generation) -> Script:
    """Four words a choice, the choices in turn, at most `max_tokens`."""
    count = len(WORDS) if generation.max_tokens is None else min(len(WORDS), generation.max_tokens)
    script: Script = [*prompt_logprobs(generation)]
    for token, word in enumerate(WORDS[:count]):
        for index in range(generation.n):
            script.append(TextDelta(word, (token,), position(generation, token), index))
    reason = "stop" if count == len(WORDS) else "length"
    usage = Usage(prompt_tokens=prompt_length(generation), cached_tokens=1, completion_tokens=count)
    script += [Finished(reason, usage, index=index) for index in range(generation.n)]
    return script


class FakeSource:
    """Plays a script; `interrupt` replaces what is left of it."""

    def __init__(self, generation: Generation, script: Script) -> None:
        self.request_id = generation.request_id
        self.prompt_tokens = prompt_length(generation)
        self.n = generation.n
        self.open = set(range(generation.n))
        self._script = list(script)
        self._interrupted = asyncio.Event()
        self.at_gate = asyncio.Event()

    @property
    def left(self) -> int:
        return len(self._script)

    def interrupt(self, make: Callable[[int], Event]) -> None:
        self._script = [[make(index) for index in sorted(self.open)]]
        self._interrupted.set()

    async def take(self) -> list[Event]:
        while self.open:
            if not self._script:
                return []
            item = self._script[0]
            if isinstance(item, asyncio.Event):
                await self._wait(item)
                if self._script and self._script[0] is item:
                    self._script.pop(0)
                continue
            self._script.pop(0)
            if isinstance(item, Exception):
                raise item
            events = item if isinstance(item, list) else [item]
            self.open -= {event.index for event in events if isinstance(event, Finished | Failed)}
            await asyncio.sleep(0)
            return events
        return []

    async def _wait(self, gate: asyncio.Event) -> None:
        self.at_gate.set()
        waits = [asyncio.ensure_future(event.wait()) for event in (gate, self._interrupted)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        while events := await self.take():
            for event in events:
                yield event


class FakeService:
    """What a test may set: `script`, `refusals` (raised by the next submissions, in order), `ready`, `most`.

    Attributes:
        submitted: every accepted Generation.
        cancelled: ids of requests whose listener left before the end.
        active: requests being listened to.
    """

    def __init__(self, script: Callable[[Generation], Script] = hello, *, loaded: bool = True) -> None:
        self.script = script
        self.refusals: list[TroupeError] = []
        self.submitted: list[Generation] = []
        self.cancelled: list[str] = []
        self.active: dict[str, FakeSource] = {}
        self.most: int | None = None
        self.state = Readiness(ready=True) if loaded else Readiness(ready=False, reason="loading", detail="0 %")
        self.may_load = asyncio.Event()
        self.load_error: Exception | None = None
        self.exited = False
        self.changed = asyncio.Condition()
        self._model = ModelInfo(name="fake/model", context_length=4096, vocab_size=VOCAB_SIZE, created=1_700_000_000)
        self._loaded = loaded

    async def __aenter__(self) -> "FakeService":
        await self.may_load.wait()
        if self.load_error is not None:
            raise self.load_error
        self._loaded = True
        self.state = Readiness(ready=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.exited = True
        self.state = Readiness(ready=False, reason="failed")

    @property
    def model(self) -> ModelInfo:
        if not self._loaded:
            raise NotReady("still loading", retry_after_s=2.5)
        return self._model

    @asynccontextmanager
    async def stream(self, generation: Generation) -> AsyncIterator[FakeSource]:
        self._admit(generation)
        source = FakeSource(generation, self.script(generation))
        self.active[generation.request_id] = source
        await self._notify()
        try:
            yield source
        finally:
            del self.active[generation.request_id]
            if source.open:
                self.cancelled.append(generation.request_id)
            await asyncio.shield(self._notify())

    def _admit(self, generation: Generation) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        if not self.state.ready:
            raise NotReady(f"{self.state.reason}")
        if self.most is not None and len(self.active) >= self.most:
            raise Overloaded("the queue is full", retry_after_s=0.2)
        if generation.request_id in self.active:
            raise InvalidRequest("duplicate id", param="request_id")
        generation.sampling.check(VOCAB_SIZE)
        check_token_ids(generation.tokens or (), VOCAB_SIZE, "tokens")
        check_token_ids(generation.stop_token_ids, VOCAB_SIZE, "stop_token_ids")
        self.submitted.append(generation)

    async def complete(self, generation: Generation) -> Completion:
        texts = [""] * generation.n
        tokens: list[tuple[int, ...]] = [()] * generation.n
        logprobs: list[tuple[PositionLogprobs, ...]] = [()] * generation.n
        ends: dict[int, Finished] = {}
        prompts: dict[int, PromptLogprobs] = {}
        async with self.stream(generation) as source:
            async for event in source:
                match event:
                    case TextDelta(index=index):
                        texts[index] += event.text
                        tokens[index] += event.tokens
                        logprobs[index] += event.logprobs or ()
                    case PromptLogprobs(index=index):
                        prompts[index] = event
                    case Finished(index=index):
                        ends[index] = event
                    case Failed(code="timeout"):
                        raise RequestTimedOut(event.message)
                    case Failed():
                        raise EngineFailed(event.message)
        asked = generation.sampling.top_logprobs is not None
        choices = tuple(
            Choice(
                texts[i],
                tokens[i],
                ends[i].reason,
                logprobs[i] if asked else None,
                None,
                ends[i].usage,
                prompt=prompts.get(i),
            )
            for i in range(generation.n)
        )
        return Completion(generation.request_id, self._model.name, choices, choices[0].usage)

    async def embed(self, query: EmbeddingQuery) -> Embeddings:
        vectors = []
        tokens = 0
        for place, given in enumerate(query.inputs):
            ids = await self.tokenize(given) if isinstance(given, str) else given
            check_token_ids(ids, VOCAB_SIZE, "input")
            generation = Generation(tokens=tuple(ids), request_id=f"{query.request_id}-{place}")
            async with self.stream(generation) as source:
                async for _ in source:
                    pass
            vectors.append(unit(np.array([*ids, 1, 2], np.float32)[-3:].tobytes(), query.dimensions))
            tokens += len(ids)
        return Embeddings(tuple(vectors), tokens)

    def cancel(self, request_id: str) -> None:
        source = self.active.get(request_id)
        if source is not None:
            source.interrupt(lambda index: Finished("cancelled", Usage(), index=index))

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) % VOCAB_SIZE for letter in text]

    async def detokenize(self, tokens: list[int]) -> str:
        return "".join(self.token_text(token)[0] for token in tokens)

    async def count_tokens(self, generation: Generation) -> int:
        return prompt_length(generation)

    def token_text(self, token: int) -> tuple[str, bytes]:
        text = WORDS[token] if token < len(WORDS) else f"<{token}>"
        return text, text.encode()

    def readiness(self) -> Readiness:
        return self.state

    async def status(self) -> Status:
        return Status(model="fake", readiness=self.state, statistics=self.statistics(), memory=None)

    def statistics(self) -> Statistics:
        return Statistics(
            running=len(self.active),
            prefilling=0,
            waiting=0,
            steps=0,
            prompt_tokens=0,
            completion_tokens=0,
            finished={},
        )

    async def metrics(self) -> bytes:
        return b"# TYPE mlx_troupe_num_requests_running gauge\nmlx_troupe_num_requests_running %d\n" % len(self.active)

    async def drain(self, timeout_s: float) -> None:
        self.state = Readiness(ready=False, reason="draining")
        try:
            async with asyncio.timeout(timeout_s):
                await self.until(lambda: not self.active)
        except TimeoutError:
            for source in list(self.active.values()):
                source.interrupt(lambda index: Failed("not_ready", "the server is stopping", None, 1.0, index))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a change of `active` or `cancelled` that makes the condition true."""
        async with self.changed:
            await self.changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()
