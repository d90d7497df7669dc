"""The facade's face: what the API, the CLI and embedders may ask of a runtime.

`Runtime` (in this process) is one implementation, `RemoteRuntime` (in a process of its own) another; tests bring a fake
one. All methods run on the caller's event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from .events import Event
    from .generation import Completion, EmbeddingQuery, Embeddings, Generation, ModelInfo


class Readiness(msgspec.Struct, frozen=True):
    """Whether new requests are served; `reason` says why not: "loading", "restarting", "draining", "stalled" or
    "failed" (for good)."""

    ready: bool
    reason: str = ""
    detail: str = ""


class ActorStatistics(msgspec.Struct, frozen=True):
    """One actor: messages waiting, messages handled, seconds spent handling."""

    depth: int
    handled: int
    busy_s: float


class CacheStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The prefix cache, counted since the start.

    Attributes:
        queries: prompts that asked; hits of them found something: from RAM alone, with pages from disk, or with the
            last page used in part (also counted as one of the others).
        queried_tokens, hit_tokens: prompt tokens asked for and found, so saved.
        stored_pages, spilled_pages, restored_pages: taken into RAM, written to disk, brought back.
        dropped_spills: pages that were not written: the queue was full, or the disk had no room or failed.
        evicted_pages, disk_evicted_pages, lost_pages: that went for want of room, or by a fault.
        disk_faults: reads and writes that failed.
        restore_s: seconds that rows waited for pages from disk; restore_timeouts of them ended without all.
        ram_pages, ram_bytes, evictable_bytes, disk_pages, disk_bytes: held now.
        stores_in_flight, spill_queue: under way now.
    """

    queries: int = 0
    hits_ram: int = 0
    hits_disk: int = 0
    hits_partial: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    stored_pages: int = 0
    spilled_pages: int = 0
    restored_pages: int = 0
    dropped_spills: int = 0
    evicted_pages: int = 0
    disk_evicted_pages: int = 0
    lost_pages: int = 0
    disk_faults: int = 0
    restore_s: float = 0.0
    restore_timeouts: int = 0
    ram_pages: int = 0
    ram_bytes: int = 0
    evictable_bytes: int = 0
    disk_pages: int = 0
    disk_bytes: int = 0
    stores_in_flight: int = 0
    spill_queue: int = 0


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a runtime.

    Attributes:
        requeued: rows sent back to the queue, after a fault or for memory.
        preempted: of these, for memory.
        restarts: how often the engine was started anew.
        holds: how often the head of the queue was held, by reason.
        chunks: pieces of prompts that ran.
        throttled_chunks: of these, those that memory made shorter.
        crowded_chunks: how often chunks did not begin because too much memory was in use.
    """

    running: int
    prefilling: int
    waiting: int
    steps: int
    prompt_tokens: int
    completion_tokens: int
    finished: dict[str, int]
    cache: CacheStatistics = CacheStatistics()
    memory_active_bytes: int = 0
    memory_pool_bytes: int = 0
    memory_peak_bytes: int = 0
    last_step_age_s: float | None = None
    requeued: int = 0
    preempted: int = 0
    restarts: int = 0
    chunks: int = 0
    throttled_chunks: int = 0
    crowded_chunks: int = 0
    holds: dict[str, int] = {}
    actors: dict[str, ActorStatistics] = {}


class MemoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Memory, in bytes: what is used and where the lines are.

    Attributes:
        active_bytes, pool_bytes, peak_bytes: MLX's counters as last read.
        sample_age_s: how long ago that was.
        footprint_bytes: the process.
        base_bytes: what counted against the lines before anybody was served.
        admission_bytes: what admitted work may be planned to use.
        dynamic_bytes: above it admissions are held; moves with what other programs leave.
        preempt_bytes: above it the youngest row is put back to the queue.
        abort_bytes: the ceiling that does not move.
        binding: what sets the dynamic line.
        remedy: what to do about it.
        row_limit_tokens: the longest row that memory can serve; None when it is no bound, or not known.
        guarded: whether rows are planned by the model's layout; else memory is only watched.
    """

    active_bytes: int
    pool_bytes: int
    peak_bytes: int
    sample_age_s: float
    footprint_bytes: int
    base_bytes: int
    admission_bytes: int
    dynamic_bytes: int
    preempt_bytes: int
    abort_bytes: int
    binding: str
    remedy: str
    row_limit_tokens: int | None
    guarded: bool


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """All that an operator may want to know of one runtime, made anew at each call.

    Attributes:
        model: the served model's name; empty while there is none.
        readiness: whether new requests are served.
        statistics: counters and queues.
        memory: None while nothing is served.
    """

    model: str
    readiness: Readiness
    statistics: Statistics
    memory: MemoryStatus | None


class EventSource(Protocol):
    """Events of one accepted request.

    Attributes:
        request_id: its id, the caller's or a made-up one.
        prompt_tokens: how many tokens the prompt has.
    """

    request_id: str
    prompt_tokens: int

    async def take(self) -> list[Event]:
        """All events since the last call, at least one; [] after the last choice has ended."""
        ...

    def __aiter__(self) -> AsyncIterator[Event]:
        """Each event in turn, until the last choice has ended."""
        ...


class Service(Protocol):
    """A served model."""

    @property
    def model(self) -> ModelInfo:
        """What is served. Only once ready; NotReady before."""
        ...

    def stream(self, generation: Generation) -> AbstractAsyncContextManager[EventSource]:
        """Submit a request and listen to it. Leaving the block early cancels it.

        Entering raises InvalidRequest (with the parameter), ContextLengthExceeded, Overloaded or NotReady before
        any work is done. Failures after that arrive as a Failed event.
        """
        ...

    async def complete(self, generation: Generation) -> Completion:
        """Submit a request and wait for all its choices. Raises what `stream` raises, and failures as TroupeError."""
        ...

    async def embed(self, query: EmbeddingQuery) -> Embeddings:
        """Turn texts into vectors. Raises what `complete` raises; InvalidRequest when the model makes none."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request with reason "cancelled"; unknown ids are ignored."""
        ...

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    async def detokenize(self, tokens: list[int]) -> str:
        """Text of token ids. Raises InvalidRequest for ids outside the vocabulary."""
        ...

    async def count_tokens(self, generation: Generation) -> int:
        """Tokens of a request's prompt. Raises what `stream` raises for a prompt that cannot be had."""
        ...

    def token_text(self, token: int) -> tuple[str, bytes]:
        """One token's text and exact bytes, for log-probabilities."""
        ...

    def readiness(self) -> Readiness:
        """Whether new requests are served now."""
        ...

    async def status(self) -> Status:
        """All of it for an operator."""
        ...

    async def metrics(self) -> bytes:
        """Prometheus exposition text of the runtime's own metrics."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait for running ones up to `timeout_s`, end the rest with an error event."""
        ...
