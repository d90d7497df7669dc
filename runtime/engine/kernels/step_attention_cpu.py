"""Attention of few queries a row on a CPU: MLX's products, and a softmax whose exponential is arithmetic.

MLX's exponential on a CPU other than Apple's takes 15 ns a score, and a decode step of 32 rows at 170 places spent a
third of its time in it. NumPy's, which `softmax_cpu` uses for prefill, would need an evaluation a layer. Here it is
compiled out of products and sums, which take 5: with `n` the nearest whole number to `x / ln 2`,

    exp(x) = 2**n * exp(x - n * ln 2)

where the second factor is a polynomial (Cephes, `expf`) and the first is made by writing n into a float's exponent.

Owned by the MLX thread.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx

LEAST_SCORES = 6000
"""Fewer are not worth the operations: about eight of 10 us each, where MLX has three."""
_LEAST = -80.0
"""Scores so far below the best count as this far below: 2e-35, and no product with it is denormal."""
_LOG2E = 1.44269504
_TO_WHOLE = 12582912.0
"""1.5 * 2**23: a float next to it has no fraction, so adding rounds."""
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_FACTORS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_UNSEEN = -3.4028235e38


def step_fits(queries: mx.array, keys: Any, mask: Any, sinks: mx.array | None) -> bool:
    """Whether `step_attention` takes this: float32, a mask that hides or none, no sinks, and scores enough."""
    if sinks is not None or not isinstance(keys, mx.array) or queries.dtype != mx.float32 or keys.dtype != mx.float32:
        return False
    rows, heads, count, _ = queries.shape
    if rows * heads * count * keys.shape[2] < LEAST_SCORES:
        return False
    if mask is None or isinstance(mask, str):
        return mask is None or (mask == "causal" and count == 1)
    return mask.dtype == mx.bool_ and (mask.ndim == 2 or (mask.ndim == 4 and mask.shape[1] == 1))


def step_attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any) -> mx.array:
    """Attention as `mx.fast.scaled_dot_product_attention` defines it, up to rounding; lazy.

    Args:
        queries: float32 (rows, heads, count, size).
        keys: float32 (rows, key heads, places, size), and values alike.
        scale: of the scores.
        mask: None, "causal" with one query, or bool (count, places) or (rows, 1, count, places).
    """
    rows, heads, count, size = queries.shape
    groups, places = keys.shape[1], keys.shape[2]
    scores = (queries * scale).reshape(rows, groups, -1, size) @ keys.swapaxes(-1, -2)
    if isinstance(mask, mx.array):
        seen = mask.reshape(-1, 1, 1, count, places)
        scores = mx.where(seen, scores.reshape(rows, groups, -1, count, places), _UNSEEN).reshape(scores.shape)
    fraction, power = _parts(scores, scores.max(axis=-1, keepdims=True))
    weights = fraction * power.view(mx.float32)
    out = (weights @ values) / weights.sum(axis=-1, keepdims=True)
    return out.reshape(rows, heads, count, -1)


@partial(mx.compile, shapeless=True)
def _parts(scores: mx.array, best: mx.array) -> tuple[mx.array, mx.array]:
    """The exponentials of `scores - best` as a factor near 1 and the bits of a power of two."""
    x = mx.maximum(scores - best, _LEAST)
    whole = (x * _LOG2E + _TO_WHOLE) - _TO_WHOLE
    rest = (x - whole * _LN2_HIGH) - whole * _LN2_LOW
    series = rest * _FACTORS[0] + _FACTORS[1]
    for factor in _FACTORS[2:]:
        series = series * rest + factor
    return series * (rest * rest) + rest + 1.0, mx.left_shift(whole.astype(mx.int32) + 127, 23)
