"""A step between its launch and its commit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx

from ..events import PositionLogprobs, TokenLogprob
from ..messages.decode import StepResult
from ..request import PLACEHOLDER

if TYPE_CHECKING:
    from .sampling import Sampled


def marked(sampled: Sampled, logits: mx.array) -> Sampled:
    """The sample with PLACEHOLDER where the token chosen from (places, vocabulary) logits has one that is no number.

    A NaN in a row's KV makes all its logits NaN, so looking at the chosen one finds it, and costs next to nothing.
    """
    sound = mx.isfinite(mx.take_along_axis(logits, sampled.tokens[:, None], axis=-1)[:, 0])
    return sampled._replace(tokens=mx.where(sound, sampled.tokens, PLACEHOLDER))


@dataclass
class Flight:
    """One launched step, its tokens still lazy.

    Attributes:
        step: the plan's number.
        rows: the plan's rows, in the order results are given.
        order: row at each place of the batch.
        sampled: lazy tokens (places,) and log-probabilities.
        launched_s: when work on it began: with draws on the host, the step is done when it is launched.

    Invariant `tokens_are_filled_at_commit`: until then a row's token exists on the device only.
    """

    step: int
    rows: tuple[int, ...]
    order: list[int | None]
    sampled: Sampled
    launched_s: float
    _tokens: list[int] | None = field(default=None, init=False)

    def read(self) -> list[int]:
        """Wait for the device; one token a place."""
        if self._tokens is None:
            self._tokens = self.sampled.tokens.tolist()  # type: ignore[assignment]  # a vector gives a flat list
        return self._tokens  # type: ignore[return-value]

    def result(self, tokens: list[int], seconds: float) -> StepResult:
        """What decode hears. Rows that are not in the batch (they failed) get the placeholder."""
        if list(self.rows) == self.order:
            ordered = tuple(tokens)
        else:
            by_row = dict(zip(self.order, tokens, strict=True))
            ordered = tuple(by_row.get(row, PLACEHOLDER) for row in self.rows)
        return StepResult(self.step, ordered, self._logprobs(tokens), seconds, mx.get_active_memory())

    def lazy(self) -> list[mx.array]:
        """Everything besides the tokens that is read at commit."""
        logprobs = self.sampled.logprobs
        if logprobs is None:
            return []
        return [array for array in (logprobs.chosen, logprobs.top_ids, logprobs.top_logprobs) if array is not None]

    def _logprobs(self, tokens: list[int]) -> dict[int, PositionLogprobs]:
        lazy = self.sampled.logprobs
        if lazy is None:
            return {}
        chosen: list[float] = lazy.chosen.tolist()  # type: ignore[assignment]
        ids = _nested(lazy.top_ids, len(chosen))
        best = _nested(lazy.top_logprobs, len(chosen))
        out: dict[int, PositionLogprobs] = {}
        for entry, (place, count) in enumerate(zip(lazy.slots, lazy.top_counts, strict=True)):
            row = self.order[place]
            if row is not None:
                pairs = zip(ids[entry][:count], best[entry][:count], strict=True)
                top = tuple(TokenLogprob(int(token), logprob) for token, logprob in pairs)
                out[row] = PositionLogprobs(TokenLogprob(tokens[place], chosen[entry]), top)
        return out


def _nested(array: mx.array | None, count: int) -> list[list[float]]:
    if array is None:
        return [[]] * count
    rows: list[list[float]] = array.tolist()  # type: ignore[assignment]
    return rows
