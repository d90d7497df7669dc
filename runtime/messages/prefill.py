"""What prefill hears."""

from __future__ import annotations

import msgspec

from ..faults import Fault
from ..reading import ChunkReading
from ..request import Request


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """Rows that share one prompt, to be computed up to its last token but one.

    `chunk_room_bytes` is what the transient of a chunk may take from now on; None is no bound.
    """

    rows: tuple[Request, ...]
    chunk_room_bytes: int | None = None


class Matched(msgspec.Struct, frozen=True, tag=True):
    """The cache-store's answer to Match: pages leased to `row`, covering `tokens` tokens from the start.

    `branch` is where other prompts went on that the checkpoints do not reach: worth one; 0 is nowhere.
    """

    row: int
    pages: tuple[int, ...]
    tokens: int
    branch: int = 0


class Restoring(msgspec.Struct, frozen=True, tag=True):
    """Pages for `row` are on their way from disk: go on with others; Matched follows, within a deadline."""

    row: int


class StorePressure(msgspec.Struct, frozen=True, tag=True):
    """Whether so many stores are under way that no new prompt should begin."""

    full: bool


class ChunksDone(msgspec.Struct, frozen=True, tag=True):
    """Chunks that were offered have run, or were dropped unrun. Prefill answers with one Offer, empty or not.

    Attributes:
        chunks: per chunk, the row, tokens computed, depth it started at, and seconds it took.
        decoding_rows: rows decoding now, for the choice of the next chunk.
        active_bytes: device memory in use when they ended; 0 when unknown.
    """

    chunks: tuple[ChunkDone, ...]
    decoding_rows: int
    active_bytes: int = 0


class ChunkDone(msgspec.Struct, frozen=True):
    """One chunk's outcome.

    Attributes:
        row: the leader's number.
        tokens: how many were computed; 0 when the chunk did not run.
        start: depth it started at.
        seconds: time it took.
        error: None unless its forward raised.
        restore_missed: its pages were gone and nothing ran.
        dropped: decode never planned it: another Offer replaced it, or it was withdrawn.
        fault: whose doing the error was.
        transient_bytes: most that it took beside what it left behind; 0 when unknown.
        reading: what was read off it.
        crowded: too much memory was in use for it, and nothing ran.
    """

    row: int
    tokens: int
    start: int
    seconds: float
    error: str | None = None
    restore_missed: bool = False
    dropped: bool = False
    fault: Fault = "row"
    transient_bytes: int = 0
    reading: ChunkReading | None = None
    crowded: bool = False


class CancelRows(msgspec.Struct, frozen=True, tag=True):
    """End these rows with "cancelled" (or "timeout"); pass on to decode those not here."""

    rows: tuple[int, ...]
    timeout: bool = False


class DecodeLoad(msgspec.Struct, frozen=True, tag=True):
    """How many rows decode; sent when it becomes or stops being zero."""

    decoding_rows: int


class SetChunkLine(msgspec.Struct, frozen=True, tag=True):
    """Chunks may be planned to bring what MLX has in use up to so many bytes from now on."""

    line_bytes: int


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Time has passed: look at deadlines."""


PrefillMessage = (
    Admitted | Matched | Restoring | StorePressure | ChunksDone | CancelRows | DecodeLoad | SetChunkLine | Tick
)
