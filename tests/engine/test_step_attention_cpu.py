"""Decode attention with arithmetic exponentials equals MLX's, up to rounding, and leaves alone what it is not for."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_troupe.runtime.engine.kernels.step_attention_cpu import _parts, step_attention, step_fits


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape)


def case(rows: int = 8, heads: int = 6, kv_heads: int = 2, count: int = 1, places: int = 300, size: int = 32):
    mx.random.seed(rows + heads * count)
    keys, values = normal(rows, kv_heads, places + 50, size), normal(rows, kv_heads, places + 50, size // 2)
    return normal(rows, heads, count, size) * 3, keys[:, :, :places], values[:, :, :places]


@pytest.mark.parametrize("mask", [None, "causal", "rows", "shared"])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "count"), [(8, 6, 2, 1), (32, 4, 4, 1), (9, 8, 1, 1), (4, 6, 3, 5)]
)
def test_it_equals_mlx(rows, heads, kv_heads, count, mask) -> None:
    queries, keys, values = case(rows, heads, kv_heads, count)
    places = keys.shape[2]
    if mask == "rows":
        starts = mx.arange(rows) * 17
        mask = mx.broadcast_to((mx.arange(places) >= starts[:, None])[:, None, None, :], (rows, 1, count, places))
    elif mask == "shared":
        mask = mx.random.uniform(shape=(count, places)) < 0.5
    elif mask == "causal" and count > 1:
        assert not step_fits(queries, keys, mask, None)
        return
    assert step_fits(queries, keys, mask, None)
    found = step_attention(queries, keys, values, 0.2, mask)
    wanted = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.2, mask=mask)
    assert found.shape == wanted.shape
    assert float(mx.abs(found - wanted).max()) < 1e-5


def test_exponentials_over_all_scores_there_are() -> None:
    scores = mx.array(np.linspace(-100, 0, 100_001, dtype=np.float32))
    fraction, power = _parts(scores, mx.zeros((1,)))
    found = np.array(fraction * power.view(mx.float32), dtype=np.float64)
    wanted = np.exp(np.maximum(np.array(scores, dtype=np.float64), -80))
    assert np.max(np.abs(found - wanted) / wanted) < 4e-6
    assert found[-1] == 1


def test_what_is_hidden_counts_for_nothing() -> None:
    queries, keys, values = case()
    mask = mx.broadcast_to((mx.arange(300) >= 100), (8, 1, 1, 300))
    poisoned = mx.concatenate([mx.full((8, 2, 100, 16), 1e6), values[:, :, 100:]], axis=2)
    clean = step_attention(queries, keys, values, 0.2, mask)
    assert float(mx.abs(step_attention(queries, keys, poisoned, 0.2, mask) - clean).max()) < 1e-6


def test_a_query_that_sees_nothing_is_no_nan() -> None:
    queries, keys, values = case()
    out = step_attention(queries, keys, values, 0.2, mx.zeros((8, 1, 1, 300), dtype=mx.bool_))
    assert bool(mx.isfinite(out).all())


def test_a_nan_stays_in_its_row() -> None:
    queries, keys, values = case()
    broken = mx.concatenate([mx.full((1, 2, 300, 32), float("nan")), keys[1:]], axis=0)
    out = step_attention(queries, broken, values, 0.2, None)
    assert bool(mx.isnan(out[0]).all())
    assert bool(mx.isfinite(out[1:]).all())


def test_what_it_leaves_to_mlx() -> None:
    queries, keys, _ = case()
    assert not step_fits(queries, keys, None, mx.zeros((6,)))
    assert not step_fits(queries.astype(mx.float16), keys, None, None)
    assert not step_fits(queries, keys, mx.zeros((1, 300)), None), "a mask that is added"
    assert not step_fits(*case(rows=1, places=100)[:2], None, None), "too few scores"
    assert not step_fits(queries, (keys, keys), None, None), "quantised keys"
