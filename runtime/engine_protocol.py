"""The line between policy and mechanism: what an executor needs of an engine.

The MLX engine and the fake one of the tests pass the same conformance suite. Every method runs on the engine's own
thread, in the order it was called; only ints, floats, bytes and the plain messages cross the line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec

from .kv_estimate import KVLayout

if TYPE_CHECKING:
    from collections.abc import Callable

    from .messages.decode import ChunksResult, RowsFailed, StepResult
    from .messages.executor import StepPlan
    from .messages.memory_enforcer import MemorySample
    from .page_blob import PageBlob


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What policy must know of a loaded engine.

    Attributes:
        vocab_size: ids below it are legal.
        context_length: most tokens of one row.
        page_bytes: bytes of one page of the layers that can be cut; 0 when there are none.
        checkpoints: whether some state cannot be cut (windows, chunks, recurrent), so that prefixes need checkpoints.
        checkpoint_bytes: most bytes of one.
        cache_reason: why no prefix of this model can be kept; None when they can.
        overlap: "launch", "build" or "off", as chosen.
        overlap_reason: why, in words for the log.
        layout: "batched" or "row-by-row", with the reason after a colon.
        prefill_token_s: seconds a prompt token, measured at start at depth 0.
        kv: how rows lie on the device; None when that is not known, and memory is then only watched.
        base_bytes: device memory in use before the first row.
        device_bytes: what the device recommends to use at most; 0 when it does not say.
        unified: whether device and programs share one memory.
        embeds: whether prompts can be made vectors.
    """

    vocab_size: int
    context_length: int
    page_bytes: int = 0
    checkpoints: bool = False
    checkpoint_bytes: int = 0
    cache_reason: str | None = None
    overlap: str = "launch"
    overlap_reason: str = ""
    layout: str = "batched"
    prefill_token_s: float = 0.0
    kv: KVLayout | None = None
    base_bytes: int = 0
    device_bytes: int = 0
    unified: bool = True
    embeds: bool = True


StepMessage: TypeAlias = "StepResult | ChunksResult | RowsFailed"


class Engine(Protocol):
    """One model on one thread."""

    def run(self, plan: StepPlan, emit: Callable[[StepMessage], None]) -> None:
        """Launch `plan`, commit the plan before it, and emit what became known, in order.

        With overlap off, `plan` itself is committed too. A plan with no rows, joins, leaves and chunks only commits
        what is outstanding. Row faults are emitted as RowsFailed; anything raised here kills the executor.
        """
        ...

    def adopt(self, row: int, pages: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        """Name pieces put aside for `row` by (end, id), or free those with the id NO_PAGE; others stay aside.

        Returns the ids that could not be had.
        """
        ...

    def drop(self, pages: tuple[int, ...]) -> None:
        """Free pages; unknown ids are ignored."""
        ...

    def read_page(self, page: int) -> PageBlob | None:
        """A page's bytes, evaluated; None for an unknown id. The page stays."""
        ...

    def load_page(self, page: int, blob: PageBlob) -> None:
        """Make a page of bytes. Raises ValueError when they are not what this model's pages are."""
        ...

    def sample_memory(self, *, clear_pool: bool) -> MemorySample:
        """Read the counters, after emptying the buffer pool when asked."""
        ...

    def set_memory_limit(self, limit_bytes: int) -> None:
        """Have the allocator give back its pool before it takes more than so many bytes; `close` undoes it."""
        ...

    def close(self) -> None:
        """Free everything; nothing is called afterwards."""
        ...
