"""Attention with NumPy's softmax equals MLX's, up to rounding, and leaves alone what it is not for."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_troupe.runtime.engine.kernels import softmax_cpu
from mlx_troupe.runtime.engine.kernels.softmax_cpu import softmax_attention, softmax_fits


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape)


def case(rows: int = 1, heads: int = 6, kv_heads: int = 2, count: int = 40, places: int = 300, size: int = 32):
    mx.random.seed(rows + heads * count)
    buffer = places + 50
    keys, values = normal(rows, kv_heads, buffer, size), normal(rows, kv_heads, buffer, size // 2)
    return normal(rows, heads, count, size) * 3, keys[:, :, :places], values[:, :, :places]


def error(queries: mx.array, keys: mx.array, values: mx.array, mask) -> float:
    assert softmax_fits(queries, keys, mask, None)
    found = softmax_attention(queries, keys, values, 0.2, mask)
    wanted = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.2, mask=mask)
    assert found.shape == wanted.shape
    return float(mx.abs(found - wanted).max())


@pytest.mark.parametrize("block", [1, 1 << 13, 1 << 30])
@pytest.mark.parametrize("mask", [None, "causal", "window", "rows"])
@pytest.mark.parametrize(("rows", "heads", "kv_heads"), [(1, 6, 2), (3, 4, 4), (2, 8, 1)])
def test_it_equals_mlx(rows, heads, kv_heads, mask, block, monkeypatch) -> None:
    monkeypatch.setattr(softmax_cpu, "BLOCK_SCORES", block)
    queries, keys, values = case(rows, heads, kv_heads)
    count, places = queries.shape[2], keys.shape[2]
    own, seen = mx.arange(places - count, places)[:, None], mx.arange(places)
    if mask == "window":
        mask = (seen <= own) & (seen > own - 100)
    elif mask == "rows":
        starts = mx.array([0, 120, places])[:rows]  # one sees nothing but itself
        mask = ((seen >= starts[:, None])[:, None, None, :] & (seen <= own)) | (seen == own)
    assert error(queries, keys, values, mask) < 1e-5


def test_a_query_that_sees_nothing_is_no_nan() -> None:
    queries, keys, values = case()
    mask = mx.zeros((40, 300), dtype=mx.bool_)
    assert error(queries, keys, values, mask) < 1e-5


def test_large_scores_do_not_overflow() -> None:
    queries, keys, values = case()
    found = softmax_attention(queries * 1000, keys, values, 1.0, "causal")
    assert np.isfinite(np.array(found)).all()


def test_what_it_is_given_stays_as_it_is() -> None:
    given = case()
    kept = [np.array(array) for array in given]
    mx.eval(softmax_attention(*given, 0.2, "causal"))
    assert all(np.array_equal(a, b) for a, b in zip(kept, given, strict=True))


def test_others_are_left_alone() -> None:
    queries, keys, _ = case()
    assert softmax_fits(queries, keys, "causal", None)
    assert not softmax_fits(queries, keys, "causal", normal(6))
    assert not softmax_fits(queries, keys, mx.zeros((40, 300)), None)
    assert not softmax_fits(queries.astype(mx.float16), keys, "causal", None)
    assert not softmax_fits(queries, (keys, keys, keys), "causal", None)
    assert not softmax_fits(queries[:, :, :1], keys, None, None)
    assert not softmax_fits(queries, keys, mx.ones((1, 6, 40, 300), dtype=mx.bool_), None)
