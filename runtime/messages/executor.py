"""What the executor hears: plans and page orders, run in order on the MLX thread."""

from __future__ import annotations

import msgspec

from ..constraint import Constraint
from ..page_blob import PageBlob
from ..reading import PromptReading
from ..sampling_params import SamplingParams

NO_PAGE = 0
"""Never the id of a page."""


class Chunk(msgspec.Struct, frozen=True):
    """A piece of one row's prompt to run through the model into the row's staged KV.

    Attributes:
        row: whose (the leader's, when several rows share the prompt).
        tokens: ids at positions start .. start + len(tokens) - 1.
        start: tokens staged before this chunk; when it equals restore_tokens, the pages come first.
        restore_pages: page ids that make up the first restore_tokens tokens; only on a row's first chunk.
        restore_tokens: may end inside the last page.
        cuts: positions at which the forward is split, besides those of the checkpoints.
        stash: where pieces end that are to be copied aside when this chunk is done; a piece begins at the last page
            boundary before its end.
        checkpoints: of these, the ends at which the state of layers that cannot be cut is kept too.
        reading: what is read off the forward; None is nothing.
        following: the prompt's tokens behind the chunk's, one at most.
        target: tokens that the row will have staged in the end; 0 when that is not known.
    """

    row: int
    tokens: tuple[int, ...]
    start: int
    restore_pages: tuple[int, ...] = ()
    restore_tokens: int = 0
    cuts: tuple[int, ...] = ()
    stash: tuple[int, ...] = ()
    checkpoints: tuple[int, ...] = ()
    reading: PromptReading | None = None
    following: tuple[int, ...] = ()
    target: int = 0


class JoinRow(msgspec.Struct, frozen=True):
    """A row that decodes from this step on.

    Attributes:
        row: its number.
        source: row whose staged KV it copies (staged_tokens tokens).
        staged_tokens: how many tokens that KV holds; 0 means none was staged (a one-token prompt).
        token: last prompt token, the input of its first step.
        history: prompt ids, for penalties; empty when the row has none.
        sampling: how its tokens are picked.
        position: index of the output token it samples first.
        suppress: ids that may not come before output position suppress_until (end tokens under min_tokens).
        constraint: masks the row's tokens; handed over, and used on the MLX thread alone from then on.
    """

    row: int
    source: int
    staged_tokens: int
    token: int
    sampling: SamplingParams
    history: tuple[int, ...] = ()
    position: int = 0
    suppress: tuple[int, ...] = ()
    suppress_until: int = 0
    constraint: Constraint | None = None


class LeaveRow(msgspec.Struct, frozen=True):
    """A row that takes part no more; pieces of its KV that end at `stash` are copied aside first."""

    row: int
    stash: tuple[int, ...] = ()


class StepPlan(msgspec.Struct, frozen=True, tag=True):
    """Everything one step does. Rows that are in neither joins nor leaves carry on from the step before.

    Attributes:
        step: number, one more than the plan before.
        rows: rows that decode one token, in an order that stays; () is a plan without decoding.
        joins, leaves: changes to the batch, applied before the forward; leaves first.
        chunks: prefill work, run after the decode forward.
        discards: staged KV to free (after the joins).
        chunks_below_bytes: the chunks do not run when more than this is in use as they would begin; 0 lets them.
    """

    step: int
    rows: tuple[int, ...] = ()
    joins: tuple[JoinRow, ...] = ()
    leaves: tuple[LeaveRow, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    discards: tuple[int, ...] = ()
    chunks_below_bytes: int = 0


class AdoptPages(msgspec.Struct, frozen=True, tag=True):
    """Name pieces that a chunk or leave put aside for `row`: (end, page id) pairs; id NO_PAGE frees the piece.

    An id that is known already gets the new piece. Pieces that are not listed stay aside: a later chunk of the row may
    have put them there. `store` is the cache-store's number of the store; it hears PagesAdopted.
    """

    row: int
    pages: tuple[tuple[int, int], ...]
    store: int = 0


class DropPages(msgspec.Struct, frozen=True, tag=True):
    """Free pages by id."""

    pages: tuple[int, ...]


class ReadPage(msgspec.Struct, frozen=True, tag=True):
    """Show the cache-store a page's bytes (PageRead)."""

    page: int


class LoadPage(msgspec.Struct, frozen=True, tag=True):
    """Make a page of bytes that came from disk; the cache-store hears PageLoaded."""

    page: int
    blob: PageBlob


class SampleMemory(msgspec.Struct, frozen=True, tag=True):
    """Read MLX's memory counters on its thread and tell the memory-enforcer."""

    clear_pool: bool = False


class SetMemoryLimit(msgspec.Struct, frozen=True, tag=True):
    """Have the allocator give back its pool before it takes more than so many bytes."""

    limit_bytes: int


class EngineRaised(msgspec.Struct, frozen=True, tag=True):
    """The engine or its thread is gone, with this error; said by the thread."""

    error: str


ExecutorMessage = StepPlan | AdoptPages | DropPages | ReadPage | LoadPage | SampleMemory | SetMemoryLimit | EngineRaised
