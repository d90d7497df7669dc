"""Attention of many queries on a CPU: products by MLX's BLAS, the softmax between them by NumPy.

MLX's exponential on a CPU other than Apple's takes 12 ns a score, NumPy's (vectorised) 0.5: of 64 queries over 1,564
keys of a 9-head layer, 11 of 13 ms were exponentials. The softmax is made in place in the array of scores, a block of
queries at a time, so that scores stay in the processor's cache and a causal block skips the keys behind it.

Owned by the MLX thread. Evaluates, so it is for prefill, which waits for its result anyway.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

LEAST_SCORES = 1 << 15
"""Fewer are not worth the evaluations in between."""
LEAST_QUERIES = 8
BLOCK_SCORES = 1 << 20
"""Scores of all heads made at once."""


def softmax_fits(queries: mx.array, keys: Any, mask: Any, sinks: mx.array | None) -> bool:
    """Whether `softmax_attention` takes this: many queries in float32, no mask that adds, no sinks."""
    if sinks is not None or not isinstance(keys, mx.array) or queries.dtype != mx.float32 or keys.dtype != mx.float32:
        return False
    rows, heads, count, _ = queries.shape
    if count < LEAST_QUERIES or rows * heads * count * keys.shape[2] < LEAST_SCORES:
        return False
    if mask is None or isinstance(mask, str):
        return mask in (None, "causal")
    return mask.dtype == mx.bool_ and (mask.ndim == 2 or (mask.ndim == 4 and mask.shape[1] == 1))


def softmax_attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any) -> mx.array:
    """Attention as `mx.fast.scaled_dot_product_attention` defines it, up to rounding.

    Args:
        queries: float32 (rows, heads, count, size).
        keys: float32 (rows, key heads, places, size), and values alike.
        scale: of the scores.
        mask: None, "causal" (the queries are the last places), or bool (count, places) or (rows, 1, count, places).
    """
    rows, heads, count, size = queries.shape
    places = keys.shape[2]
    seen = None if mask is None or isinstance(mask, str) else np.array(mask).reshape(-1, 1, 1, count, places)
    step = max(LEAST_QUERIES, BLOCK_SCORES // (rows * heads * places))
    out = []
    for low in range(0, count, step):
        high = min(count, low + step)
        end = places - count + high if mask == "causal" else places
        block = (queries[:, :, low:high] * scale).reshape(rows, keys.shape[1], -1, size)
        scores = block @ keys[:, :, :end].swapaxes(-1, -2)
        mx.eval(scores)
        shape = (rows, keys.shape[1], heads // keys.shape[1], high - low, end)
        view = np.asarray(scores).reshape(shape)
        if mask == "causal":
            _hide(view[..., end - (high - low) :], np.tri(high - low, dtype=bool))
        elif seen is not None:
            _hide(view, seen[..., low:high, :])
        total = _exponentials(view)
        part = (scores @ values[:, :, :end]).reshape(rows, heads, high - low, -1)
        out.append(part / mx.array(total.reshape(rows, heads, high - low, 1)))
    return out[0] if len(out) == 1 else mx.concatenate(out, axis=2)


def _hide(scores: np.ndarray, seen: np.ndarray) -> None:
    """Give what is not seen the least score there is, as MLX does: a query that sees nothing sees all evenly."""
    np.copyto(scores, np.finfo(np.float32).min, where=~seen)


def _exponentials(scores: np.ndarray) -> np.ndarray:
    """Turn scores into their exponentials, relative to each query's largest, in place; returns their sums."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    return scores.sum(axis=-1, keepdims=True)
