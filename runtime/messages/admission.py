"""What admission hears."""

from __future__ import annotations

import msgspec

from ..actor import Reply
from ..request import Request


class Submit(msgspec.Struct, frozen=True, tag=True):
    """New rows that share one prompt (`n` choices), accepted or refused together.

    The reply is None once they wait in the queue; Overloaded or InvalidRequest when refused.
    """

    rows: tuple[Request, ...]
    reply: Reply[None]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The client went away or asked to stop: every row of the request ends with reason "cancelled"."""

    request_id: str


class RowDone(msgspec.Struct, frozen=True, tag=True):
    """A row that was admitted has ended, in whatever way: its place is free."""

    row: int


class Requeue(msgspec.Struct, frozen=True, tag=True):
    """Admitted rows that were sent back: they queue again, at the place in which they came, and share one prefill."""

    rows: tuple[Request, ...]


class PauseAdmission(msgspec.Struct, frozen=True, tag=True):
    """The memory-enforcer holds new work while something runs; None lifts it."""

    reason: str | None


class SetMemoryLine(msgspec.Struct, frozen=True, tag=True):
    """What admitted work may be planned to use from now on; moves with what other programs leave."""

    line_bytes: int


class CacheHolds(msgspec.Struct, frozen=True, tag=True):
    """The cache-store's answer to SetBudget: what its pages take; leases may keep it above the budget for a while."""

    budget_bytes: int
    bytes: int


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Refuse new requests from now on; the reply comes when the last row has ended."""

    reply: Reply[None]


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Time has passed: look at deadlines."""


AdmissionMessage = Submit | Cancel | RowDone | Requeue | PauseAdmission | SetMemoryLine | CacheHolds | Drain | Tick
