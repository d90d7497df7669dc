"""A request inside the runtime and its life cycle.

`Queued -> Admitted -> Restoring? -> Prefilling -> Running -> Finished`. One transition table, one checked `move`;
Finished is terminal. A request that was preempted, or whose forward failed, goes back to Queued and later recomputes
its prompt and the output it has, whose tokens and text its listener keeps.

A request is owned by one actor at a time: the one its state names (admission, prefill, prefill, prefill, decode); only
the owner changes it.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

from .errors import InvalidRequest, Overloaded, TroupeError
from .events import Failed, Finished, FinishReason, Usage

if TYPE_CHECKING:
    from collections.abc import Callable

    from .constraint import Constraint
    from .event_stream import Mailbox
    from .reading import PromptReading
    from .sampling_params import SamplingParams
    from .text import TextStream

PLACEHOLDER = -1
"""Stands for a token that is launched but not read yet; never a legal id."""


class State(Enum):
    """Where a request is in its life."""

    QUEUED = "queued"
    ADMITTED = "admitted"
    RESTORING = "restoring"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.ADMITTED, State.FINISHED}),
    State.ADMITTED: frozenset({State.RESTORING, State.PREFILLING, State.FINISHED}),
    State.RESTORING: frozenset({State.PREFILLING, State.FINISHED}),
    State.PREFILLING: frozenset({State.RUNNING, State.QUEUED, State.FINISHED}),
    State.RUNNING: frozenset({State.QUEUED, State.FINISHED}),
    State.FINISHED: frozenset(),
}


class GapRecorder(Protocol):
    """Hears the time between tokens."""

    def observe(self, seconds: float, /) -> None:
        """One gap."""
        ...


class IllegalTransition(RuntimeError):
    """A request was moved along an edge that does not exist: a bug, never a client's doing."""


class Request:
    """One choice of one client request: one row.

    Attributes:
        row: number of the row, unique in the runtime's life.
        request_id: the client's or made-up id, shared by the choices of one request.
        index: which choice.
        prompt: prompt token ids, at least one.
        output: sampled ids; PLACEHOLDER while in flight is never stored here, only counted by decode.
        sampling, max_tokens, min_tokens, stop_tokens: how the row runs; max_tokens is exact and known beforehand, and 0
            for a row that ends with its prompt.
        text: this row's detokenizer and stop matcher.
        events: where its events go.
        computed: tokens of prompt and output whose KV exists or is in flight.
        cached: of these, how many came from the prefix cache.
        leader: row whose prefill this one shares (its own number when it does its own).
        deadline_s: clock time at which it ends with "timeout"; None is never.
        constraint: masks its tokens; handed to the engine when the row joins.
        on_end: called once with the request, when it has ended.
        gaps: hears the seconds between two tokens.
        cache: whether it takes from the prefix cache and gives to it.
        namespace: whose cached prefixes it shares.
        turn_start: where the generation prompt begins; None when that is not known.
        reasoning: ids that open reasoning which the next turn's template drops; an output that begins with them, or
            goes on from a prompt that ends with them, is not worth keeping. Empty when it drops nothing.
        resumed: output tokens that it had when it was last sent back; prefill computes them with the prompt.
        returns: how often it was sent back to the queue.
        faults: how often that was because a forward with it failed.
        reading: what is read off its prompt; None is nothing, or that it has been read. Such a row keeps out of the
            prefix cache: what is cached is not computed.
    """

    __slots__ = (
        "admitted_s",
        "arrived_s",
        "cache",
        "cached",
        "computed",
        "constraint",
        "deadline_s",
        "events",
        "faults",
        "finish_reason",
        "first_token_s",
        "finished_s",
        "gaps",
        "index",
        "last_token_s",
        "leader",
        "max_tokens",
        "min_tokens",
        "namespace",
        "on_end",
        "output",
        "priority",
        "prompt",
        "reading",
        "reasoning",
        "request_id",
        "resumed",
        "returns",
        "row",
        "running_s",
        "sampling",
        "state",
        "stop_tokens",
        "text",
        "turn_start",
    )

    def __init__(
        self,
        *,
        row: int,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        max_tokens: int,
        text: TextStream,
        events: Mailbox,
        arrived_s: float,
        index: int = 0,
        leader: int | None = None,
        min_tokens: int = 0,
        stop_tokens: frozenset[int] = frozenset(),
        deadline_s: float | None = None,
        priority: int = 0,
        cache: bool = True,
        constraint: Constraint | None = None,
        on_end: Callable[[Request], None] | None = None,
        gaps: GapRecorder | None = None,
        namespace: str = "",
        turn_start: int | None = None,
        reasoning: tuple[int, ...] = (),
        reading: PromptReading | None = None,
    ) -> None:
        self.reading = reading
        self.namespace = namespace
        self.turn_start = turn_start
        self.reasoning = reasoning
        self.constraint = constraint
        self.on_end = on_end
        self.gaps = gaps
        self.row = row
        self.request_id = request_id
        self.index = index
        self.prompt = prompt
        self.output: list[int] = []
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.stop_tokens = stop_tokens
        self.text = text
        self.events = events
        self.computed = 0
        self.cached = 0
        self.resumed = 0
        self.returns = 0
        self.faults = 0
        self.leader = row if leader is None else leader
        self.deadline_s = deadline_s
        self.priority = priority
        self.cache = cache and reading is None
        self.state = State.QUEUED
        self.finish_reason: FinishReason | str | None = None
        self.arrived_s = arrived_s
        self.admitted_s: float | None = None
        self.running_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.finished_s: float | None = None

    @property
    def finished(self) -> bool:
        """True once a final event was sent."""
        return self.state is State.FINISHED

    @property
    def keeps_output(self) -> bool:
        """Whether the next turn of the conversation will have this output in it."""
        opened, count = list(self.reasoning), len(self.reasoning)
        if not count:
            return True
        end = self.prompt[-count - 2 :]  # a line end or two may follow in the generation prompt
        starts = [end[at : at + count] for at in range(len(end) - count + 1)]
        return opened not in [self.output[:count], *starts]

    @property
    def prefill_target(self) -> int:
        """Tokens that prefill computes: `known_tokens` but the last, which joins as a decode row; all for a vector."""
        if self.reading is not None and self.reading.pooling is not None:
            return len(self.prompt)
        return len(self.prompt) + self.resumed - 1

    @property
    def known_tokens(self) -> list[int]:
        """The prompt, and the output that a row sent back had by then."""
        return self.prompt + self.output[: self.resumed] if self.resumed else self.prompt

    @property
    def may_return(self) -> bool:
        """Whether it can be sent back: a constraint has seen tokens that were never read and cannot unsee them."""
        return self.constraint is None and not self.finished

    def send_back(self, *, leader: int) -> None:
        """Return to the queue with the output it has. Raises IllegalTransition for one that is not at work.

        Args:
            leader: row under which its prompt and output will be computed.
        """
        self.move(State.QUEUED)
        self.resumed = len(self.output)
        self.returns += 1
        self.computed = 0
        self.leader = leader

    def move(self, to: State) -> None:
        """Change state along the table, or raise IllegalTransition."""
        if to not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"row {self.row}: {self.state.value} -> {to.value}")
        self.state = to

    def usage(self, now_s: float) -> Usage:
        """Counts and times so far; `now_s` closes the phase that is still open."""
        admitted = self.admitted_s if self.admitted_s is not None else now_s
        running = self.running_s if self.running_s is not None else now_s
        return Usage(
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached,
            completion_tokens=len(self.output),
            queue_s=admitted - self.arrived_s,
            prefill_s=max(0.0, running - admitted),
            decode_s=max(0.0, now_s - running),
        )

    def finish(self, reason: FinishReason, now_s: float, *, stop: str | int | None = None) -> bool:
        """End with a final event. False, and nothing happens, when it had ended before."""
        if self.finished:
            return False
        self._end(reason, now_s)
        self.events.push(Finished(reason, self.usage(now_s), stop, self.index))
        return True

    def fail(self, error: TroupeError, now_s: float) -> bool:
        """End with an error event. False, and nothing happens, when it had ended before."""
        if self.finished:
            return False
        self._end(("rejected:" if isinstance(error, InvalidRequest | Overloaded) else "error:") + error.code, now_s)
        retry = error.retry_after_s if isinstance(error, Overloaded) else None
        self.events.push(Failed(error.code, error.message, error.param, retry, self.index))
        return True

    def _end(self, reason: FinishReason | str, now_s: float) -> None:
        self.move(State.FINISHED)
        self.finish_reason = reason
        self.finished_s = now_s
        if self.on_end is not None:
            self.on_end(self)
