"""A step between its launch and its commit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from ..events import PositionLogprobs, TokenLogprob
from ..messages.decode import StepResult
from ..request import PLACEHOLDER

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .sampling import Sampled


def marked(sampled: Sampled, logits: mx.array) -> Sampled:
    """The sample with PLACEHOLDER where the token chosen from (places, vocabulary) logits has one that is no number.

    A NaN in a row's KV makes all its logits NaN, so looking at the chosen one finds it, and costs next to nothing.
    """
    sound = mx.isfinite(mx.take_along_axis(logits, sampled.tokens[:, None], axis=-1)[:, 0])
    return sampled._replace(tokens=mx.where(sound, sampled.tokens, PLACEHOLDER))


def marked_on_host(sampled: Sampled, logits: mx.array) -> NDArray[np.int32]:
    """The tokens that `marked` gives, by numpy: waits."""
    tokens = np.array(sampled.tokens)
    chosen = np.take_along_axis(np.asarray(logits.astype(mx.float32)), tokens[:, None], axis=-1)[:, 0]
    return np.where(np.isfinite(chosen), tokens, PLACEHOLDER)


@dataclass
class Flight:
    """One launched step, its tokens still lazy.

    Attributes:
        step: the plan's number.
        rows: the plan's rows, in the order results are given.
        order: row at each place of the batch.
        draw: gives tokens (places,) and log-probabilities, lazy or drawn on the host; called once.
        launched_s: when work on it began.
        put_off: the draw waits for the forward, and is made when the tokens are read.

    Invariant `tokens_are_filled_at_commit`: until then a row's token exists on the device only.
    """

    step: int
    rows: tuple[int, ...]
    order: list[int | None]
    draw: Callable[[], Sampled]
    launched_s: float
    put_off: bool = False
    _sampled: Sampled | None = field(default=None, init=False)
    _tokens: list[int] | None = field(default=None, init=False)

    @property
    def sampled(self) -> Sampled:
        """What was drawn, now at the latest."""
        if self._sampled is None:
            self._sampled = self.draw()
        return self._sampled

    @property
    def undrawn(self) -> bool:
        """Whether the next forward, built on these tokens already, may not start yet."""
        return self.put_off and self._sampled is None

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
