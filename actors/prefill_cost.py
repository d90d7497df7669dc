"""How long a chunk will take, learnt from the chunks that ran.

Model: `seconds = n * (a + b * (depth + n / 2))`, where `a` is the work a token costs anywhere (products with weights)
and `b` what it costs more for each token before it (attention). A throughput that only knows tokens/s overshoots deep
in a prompt, and its running maximum never recovers (DESIGN section 6).

Divided by n the model is linear in (a, b). It is fitted by recursive least squares that forget by letting (a, b) drift
(a Kalman filter): unlike a fading sum it keeps what it knows of a slope while all new chunks lie at the same depth.
Both are kept non-negative. Noise is taken to be relative, so that one chunk in which MLX compiled, or another program
ran, moves little.
"""

from __future__ import annotations

import math

_DEPTH_UNIT = 4096
"""Slopes are kept per so many tokens, which makes them as large as `a`."""
_UNKNOWN_TOKEN_S = 1e-3
_SPREAD_KNOWN, _SPREAD_UNKNOWN = 3.0, 10.0
"""Standard deviation of the first guesses, relative to the cost of a token."""
_DRIFT = 0.05
"""Relative standard deviation of the change from one chunk to the next."""
_NOISE = 0.1
"""Relative standard deviation of the time of a chunk of at least `_FULL_TOKENS`; shorter ones are noisier."""
_FULL_TOKENS = 256
_WIDENING_S = 1e-9
"""First guess for a byte of larger caches: 4 us a page of the system's, which has to be had and zeroed."""
_WIDENING_SMOOTHING = 0.5
MUCH_BYTES = 16 << 20
_SCORED_SHARE = 2.0
"""First guess of what a token costs when its logits are computed as well."""


class ChunkCost:
    """Owned by the prefill core.

    Args:
        token_s: seconds a token at depth 0, as measured at start; 0 when unknown.

    Attributes:
        base_s: a.
        depth_s: b.
    """

    def __init__(self, token_s: float = 0.0) -> None:
        self.base_s = token_s or _UNKNOWN_TOKEN_S
        self.depth_s = self.base_s / _DEPTH_UNIT
        spread_s = self.base_s * (_SPREAD_KNOWN if token_s else _SPREAD_UNKNOWN)
        self._variance = spread_s**2, 0.0, (4 * spread_s) ** 2  # of a, of both, of the slope
        self._scored: ChunkCost | None = None
        self._widening_s = _WIDENING_S

    def of(self, *, scored: bool) -> ChunkCost:
        """The costs of chunks that compute the logits of all their tokens: learnt apart, from this one at first."""
        if not scored:
            return self
        if self._scored is None:
            self._scored = ChunkCost(_SCORED_SHARE * self.base_s)
        return self._scored

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

    def widening_s(self, grown_bytes: int) -> float:
        """Predicted time for a row's caches to grow by so many bytes, which happens once a prompt."""
        return self._widening_s * grown_bytes

    def observe_widening(self, tokens: int, depth: int, seconds: float, grown_bytes: int) -> None:
        """Learn from a chunk that ran and whose row's caches grew by MUCH_BYTES or more."""
        excess_s = max(0.0, seconds - self.seconds(tokens, depth))
        self._widening_s += _WIDENING_SMOOTHING * (excess_s / grown_bytes - self._widening_s)

    def observe(self, tokens: int, depth: int, seconds: float) -> None:
        """Learn from a chunk that ran."""
        if tokens <= 0 or seconds <= 0.0:
            return
        base, slope = self.base_s, self.depth_s * _DEPTH_UNIT
        place = (depth + tokens / 2) / _DEPTH_UNIT
        measured, predicted = seconds / tokens, base + slope * place
        of_base, of_both, of_slope = self._variance
        of_base += (_DRIFT * base) ** 2
        of_slope += (_DRIFT * (slope + base)) ** 2
        noise = (_NOISE * max(measured, predicted)) ** 2 * max(1.0, _FULL_TOKENS / tokens)
        toward_base = of_base + of_both * place
        toward_slope = of_both + of_slope * place
        total = toward_base + toward_slope * place + noise
        step = (measured - predicted) / total
        base += toward_base * step
        slope += toward_slope * step
        of_base -= toward_base * toward_base / total
        of_both -= toward_base * toward_slope / total
        of_slope -= toward_slope * toward_slope / total
        if slope < 0.0:
            base, slope = base - of_both / of_slope * slope, 0.0
        elif base < 0.0:
            base, slope = 0.0, slope - of_both / of_base * base
        self._variance = of_base, of_both, of_slope
        self.base_s = max(0.0, base)
        self.depth_s = max(0.0, slope) / _DEPTH_UNIT
