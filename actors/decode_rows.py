"""Rows and plans as decode keeps them, and the two messages made of a row: how it joins and how it leaves."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..runtime.messages.cache_store import Store
from ..runtime.messages.executor import JoinRow, LeaveRow
from .prefill_keep import TAIL_SHARE

if TYPE_CHECKING:
    from ..runtime.messages.executor import Chunk
    from ..runtime.request import Request


class RunningRow:
    """A row from Ready to its end.

    Attributes:
        limit: the value of `computed` at which the row's last token is in flight.
        failed_step: the engine threw it out at this step; a step that never comes while it has not.
        returns: it is on its way back to the queue, and leaves with the next plan.
    """

    __slots__ = ("failed_step", "limit", "request", "returns")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.failed_step = sys.maxsize
        self.limit = len(request.prompt) - 1 + request.max_tokens
        self.returns = False


class Flight:
    """A plan that the executor has. `rows` is None once committed, and from the start when there are none."""

    __slots__ = ("chunks", "rows", "step")

    def __init__(self, step: int, rows: list[RunningRow] | None, chunks: tuple[Chunk, ...]) -> None:
        self.step = step
        self.rows = rows
        self.chunks = chunks


def join(request: Request) -> JoinRow:
    """How a row joins: with a copy of its leader's staged KV, its last known token as the first input."""
    sampling = request.sampling
    return JoinRow(
        row=request.row,
        source=request.leader,
        staged_tokens=request.prefill_target,
        token=request.known_tokens[-1],
        sampling=sampling,
        history=tuple(request.known_tokens) if sampling.penalised else (),
        position=request.resumed,
        suppress=tuple(sorted(request.stop_tokens)) if request.min_tokens else (),
        suppress_until=request.min_tokens,
        constraint=request.constraint,
    )


def leave(request: Request, page_tokens: int, *, returns: bool = False) -> tuple[LeaveRow, Store | None]:
    """How a row leaves, and what to tell the cache-store of the pages it leaves behind.

    These are the pieces that prefill has not stored: whole pages, and the rest as a tail. Their tokens are known: of a
    row that leaves while its last token is in flight, all but that one; of a row that has ended, all but the last,
    whose KV not every row has. A row whose output the next turn's template drops leaves none.

    Args:
        request: the row.
        page_tokens: tokens of a page; 0 stores nothing.
        returns: it goes on later, and wants what it has.
    """
    if not page_tokens or not request.cache or not (returns or request.keeps_output):
        return LeaveRow(request.row), None
    known = len(request.prompt) + len(request.output) - request.finished
    last = min(request.computed, known)
    ends = list(range((request.prefill_target // page_tokens + 1) * page_tokens, last + 1, page_tokens))
    if last > request.prefill_target and last % page_tokens >= max(1, page_tokens // TAIL_SHARE):
        ends.append(last)
    if not ends:
        return LeaveRow(request.row), None
    tokens = (request.prompt + request.output)[: ends[-1]]
    return LeaveRow(request.row, tuple(ends)), Store(request.row, tuple(tokens), tuple(ends), (), request.namespace)
