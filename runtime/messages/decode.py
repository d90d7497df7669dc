"""What decode hears."""

from __future__ import annotations

import msgspec

from ..events import PositionLogprobs
from ..faults import Fault
from ..reading import ChunkReading
from ..request import Request
from .executor import Chunk


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Chunks for the next step plan, to run once running rows had `after_decode_s` seconds of steps to themselves.

    Prefill answers every ChunksDone with one Offer, after its Readys; it may be empty, and then only says that nothing
    more is to come before the next plan. An Offer with chunks replaces one that is not planned yet: decode reports the
    replaced chunks as dropped. `below_bytes` is that of the plan.
    """

    chunks: tuple[Chunk, ...]
    after_decode_s: float
    below_bytes: int = 0


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """Leaders whose prefill ended early: report their unplanned chunks as dropped and discard their staged KV."""

    rows: tuple[int, ...]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Rows of one prompt whose KV is staged under their leader: they join the next step."""

    rows: tuple[Request, ...]


class StepResult(msgspec.Struct, frozen=True, tag=True):
    """Step `step` is committed. One comes for every plan with rows, unless all of them failed.

    Attributes:
        step: number of the plan.
        tokens: one sampled id a row, in the order of the plan's rows; PLACEHOLDER for rows that failed.
        logprobs: per row that asked.
        seconds: from the later of this step's launch and the previous commit until its tokens were read.
        active_bytes: device memory in use then; 0 when unknown.
    """

    step: int
    tokens: tuple[int, ...]
    logprobs: dict[int, PositionLogprobs]
    seconds: float
    active_bytes: int = 0


class ChunksResult(msgspec.Struct, frozen=True, tag=True):
    """The chunks of step `step` have been computed; seconds and error text per chunk, in plan order.

    `active_bytes` is device memory in use then; 0 when unknown.
    """

    step: int
    outcomes: tuple[ChunkOutcome, ...]
    active_bytes: int = 0


class ChunkOutcome(msgspec.Struct, frozen=True):
    """One chunk: seconds it took, or the error; `restore_missed` when its pages were gone and nothing ran.

    `crowded` when nothing ran because more memory was in use than the plan allows its chunks to begin with.
    `fault` says whose doing an error was, and so whether it is tried again. `transient_bytes` is the most that it took
    beside what it left behind, 0 when unknown.
    """

    row: int
    seconds: float
    error: str | None = None
    restore_missed: bool = False
    fault: Fault = "row"
    transient_bytes: int = 0
    reading: ChunkReading | None = None
    crowded: bool = False


class RowsFailed(msgspec.Struct, frozen=True, tag=True):
    """These rows' forward raised; they are out of the batch, others are untouched.

    Plans sent before this was known may still name them: their tokens are PLACEHOLDER, their leaving means nothing.
    `fault` says whose doing it was, and so whether they are tried again. `code` is an error's own; None when the engine
    is at fault.
    """

    step: int
    rows: tuple[int, ...]
    error: str
    fault: Fault = "row"
    code: str | None = None


class Preempt(msgspec.Struct, frozen=True, tag=True):
    """Memory is short: send the youngest running row back to the queue, unless it is the only one.

    `last`: the only one goes as well, since a prompt has waited long for its memory.
    """

    reason: str
    last: bool = False


class CancelRunning(msgspec.Struct, frozen=True, tag=True):
    """End these rows at the next commit with "cancelled" or "timeout"."""

    rows: tuple[int, ...]
    timeout: bool = False


class ExecutorDied(msgspec.Struct, frozen=True, tag=True):
    """No step will ever come back: end every row with this error."""

    error: str


DecodeMessage = (
    Offer | Withdraw | Ready | StepResult | ChunksResult | RowsFailed | CancelRunning | Preempt | ExecutorDied
)
