"""Who goes back to the queue: after a failed forward, and when memory is short."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runtime.faults import final_error, retries

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..runtime.faults import Fault
    from ..runtime.request import Request
    from .decode_rows import RunningRow


def survives(request: Request, fault: Fault, text: str, now_s: float, *, alone: bool, code: str | None = None) -> bool:
    """Count a failed forward; True when the request is to be sent back, else it has been ended with an error.

    One whose state was bad is computed anew without the prefix cache, which may be what was bad.

    Args:
        request: not finished, or nothing happens.
        fault: whose doing it was.
        text: the error.
        now_s: the time.
        alone: nobody else was in that forward.
        code: the error's own; None when the engine is at fault.
    """
    if request.finished:
        return False
    if fault != "row":
        request.faults += 1
    if request.may_return and retries(fault, request.faults, alone=alone):
        if fault == "state":
            request.cache = False
        return True
    request.fail(final_error(fault, text, code), now_s)
    return False


def in_order_of_age(rows: Iterable[RunningRow]) -> list[RunningRow]:
    """The most urgent first, within a priority the one that came first."""
    return sorted(rows, key=lambda row: (row.request.priority, row.request.arrived_s, row.request.row))


def youngest(rows: Iterable[RunningRow]) -> RunningRow | None:
    """The row to send back when memory is short; None when none can be."""
    able = in_order_of_age(row for row in rows if row.request.may_return)
    return able[-1] if able else None
