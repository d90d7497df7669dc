"""How long a chunk will take, learnt from the chunks that ran.

Model: `seconds = n * (a + b * (depth + n / 2))`, where `a` is the work a token costs anywhere (products with weights)
and `b` what it costs more for each token before it (attention). Divided by n it is linear in (a, b), so recursive least
squares with forgetting fits it in constant time; both are kept non-negative. A throughput that only knows tokens/s
overshoots deep in a prompt, and its running maximum never recovers (DESIGN section 6).
"""

from __future__ import annotations

import math

_FORGETTING = 0.9
"""What an old chunk's weight is multiplied with at each new one: about the last ten count."""
_FULL_WEIGHT_TOKENS = 256
"""Chunks at least so long count fully; short ones are mostly overhead and noise."""
_PRIOR_WEIGHT = 0.02
_UNKNOWN_TOKEN_S = 1e-3
_UNKNOWN_DEPTH_RATIO = 1 / 4096
"""Before anything is known, a token at depth 4096 is taken to cost twice one at depth 0."""
_OUTLIER = 4.0
"""A chunk counts as at most so many times its prediction: first calls compile, other programs interfere."""


class ChunkCost:
    """Owned by the prefill core.

    Args:
        token_s: seconds a token at depth 0, as measured at start; 0 when unknown.
    """

    def __init__(self, token_s: float = 0.0) -> None:
        base_s = token_s or _UNKNOWN_TOKEN_S
        self.base_s = base_s
        self.depth_s = base_s * _UNKNOWN_DEPTH_RATIO
        # Sums over chunks of weight * (1, depth, depth^2) and weight * seconds a token * (1, depth); depth in units
        # of 4096 tokens, which keeps both directions of the same size.
        self._sums = [0.5, 0.0, 0.0, 0.5 * token_s, 0.0] if token_s else [0.0] * 5
        self._seen = 0

    def seconds(self, tokens: int, depth: int) -> float:
        """Predicted time of a chunk of `tokens` that starts at `depth`."""
        return tokens * (self.base_s + self.depth_s * (depth + tokens / 2))

    def tokens_within(self, seconds: float, depth: int) -> int:
        """Most tokens that a chunk at `depth` may have to take at most `seconds`; may be 0."""
        linear = self.base_s + self.depth_s * depth
        if self.depth_s <= 0.0:
            return int(seconds / linear) if linear > 0.0 else 1 << 30
        # The stable form of the quadratic's root.
        return int(2 * seconds / (linear + math.sqrt(linear * linear + 2 * self.depth_s * seconds)))

    def observe(self, tokens: int, depth: int, seconds: float) -> None:
        """Learn from a chunk that ran."""
        if tokens <= 0 or seconds <= 0.0:
            return
        if self._seen >= 2:
            seconds = min(seconds, _OUTLIER * self.seconds(tokens, depth))
        self._seen += 1
        weight = min(1.0, tokens / _FULL_WEIGHT_TOKENS)
        token_s = seconds / tokens
        middle = (depth + tokens / 2) * _UNKNOWN_DEPTH_RATIO
        new = (weight, weight * middle, weight * middle * middle, weight * token_s, weight * token_s * middle)
        self._sums = [_FORGETTING * old + term for old, term in zip(self._sums, new, strict=True)]
        self._solve()

    def _solve(self) -> None:
        count, depth, square, cost, cross = self._sums
        # The prior pulls weakly, so that depths never seen keep a sensible slope: relative to the present level, since
        # a wrong guess of the level says nothing about the ratio.
        level = cost / count
        prior_slope = level / 2
        square += _PRIOR_WEIGHT
        cross += _PRIOR_WEIGHT * prior_slope
        determinant = count * square - depth * depth
        base = (cost * square - cross * depth) / determinant
        slope = (count * cross - depth * cost) / determinant
        if slope < 0.0:
            base, slope = cost / count, 0.0
        elif base < 0.0:
            base, slope = 0.0, cross / square
        self.base_s = base
        self.depth_s = slope * _UNKNOWN_DEPTH_RATIO
