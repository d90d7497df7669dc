"""What is kept, and with what weight, equals mlx-lm's chain of filters."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_troupe.runtime.engine.sampling.filters import Xtc, all_masses, ranked_masses
from mlx_troupe.runtime.engine.sampling.mass import to_fixed
from mlx_troupe.runtime.engine.sampling.plan import Limits, Method, build_columns, need_of
from mlx_troupe.runtime.sampling_params import SamplingParams

from .reference import distribution, filtered, random_logits

SPECIAL = (1, 17)
MIXES = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 5.0},
    "top_p": {"top_p": 0.9},
    "top_p_small": {"top_p": 0.05, "temperature": 1.5},
    "top_p_large": {"top_p": 0.999},
    "min_p": {"min_p": 0.05},
    "min_p_one": {"min_p": 1.0},
    "top_k": {"top_k": 40},
    "top_k_one": {"top_k": 1},
    "top_k_wide": {"top_k": 300, "temperature": 1.3},
    "top_k_all": {"top_k": 100_000},
    "top_p_k": {"top_k": 50, "top_p": 0.8},
    "top_p_k_wide": {"top_k": 400, "top_p": 0.99},
    "top_p_k_min": {"top_k": 20, "top_p": 0.95, "min_p": 0.02, "temperature": 0.6},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    "xtc_zero": {"xtc_probability": 1.0, "xtc_threshold": 0.5},
    "xtc_top_k": {"xtc_probability": 1.0, "xtc_threshold": 0.02, "top_k": 5},
    "xtc_all": {"xtc_probability": 1.0, "xtc_threshold": 0.03, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
}


def masses(logits: mx.array, params: SamplingParams, sort_limit: int) -> np.ndarray:
    """Our masses by token id, XTC struck if the row has it; (B, V)."""
    rows, vocab_size = logits.shape
    need = need_of(params, Limits(vocab_size, 256, sort_limit, 8))
    columns = build_columns([params] * rows, vocab_size)
    if need.method is Method.RANKED:
        ids, found = ranked_masses(logits, columns, need.width)
        placed = mx.put_along_axis(mx.zeros(logits.shape, dtype=mx.int64), ids, found, axis=-1)
        return np.array(placed)
    xtc = None
    if params.xtc_probability > 0.0:
        exempt = np.zeros(vocab_size, dtype=bool)
        exempt[list(SPECIAL)] = True
        xtc = Xtc(mx.full((rows, 1), to_fixed(params.xtc_threshold), dtype=mx.int64), mx.array(exempt))
    return np.array(all_masses(logits, columns, xtc, sort_limit))


def top_p_margin(logits: mx.array, top_p: float) -> np.ndarray:
    """How far the mass above each token lies past the nucleus' edge, as a share, in float64; (V,), < 0 is inside."""
    values = np.array(logits, dtype=np.float64).reshape(-1)
    weights = np.exp(values - values.max())
    order = np.argsort(-values)
    above = np.zeros_like(weights)
    above[order] = np.cumsum(weights[order]) - weights[order]
    return above / weights.sum() - top_p


@pytest.mark.parametrize("sort_limit", [16, 4096])
@pytest.mark.parametrize("vocab_size", [512, 1601])
@pytest.mark.parametrize("mix", MIXES)
def test_support_and_distribution_equal_mlx_lm(mix: str, vocab_size: int, sort_limit: int) -> None:
    """Support sets are equal token for token, and probabilities to float32 rounding, for flat and peaked rows.

    Where a token lies within float32's error of the nucleus' edge mlx-lm is no guide; float64 is, in the next test.
    """
    params = SamplingParams(**MIXES[mix])
    rng = np.random.default_rng(list(MIXES).index(mix))
    compared = 0
    for spread in (0.5, 2.0, 4.0):
        logits = random_logits(rng, 8, vocab_size, spread)
        ours = masses(logits, params, sort_limit)
        for row in range(logits.shape[0]):
            if params.top_p < 1.0 and np.abs(top_p_margin(logits[row], params.top_p)).min() < 3e-6:
                continue
            compared += 1
            expected = distribution(logits[row : row + 1], params, SPECIAL)
            assert (ours[row] > 0)[expected > 1e-11].all()
            assert not (ours[row] > 0)[expected == 0].any()
            np.testing.assert_allclose(ours[row] / ours[row].sum(), expected, rtol=2e-5, atol=1e-9)
    assert compared >= 8


@pytest.mark.parametrize("vocab_size", [512, 30_011, 49_152])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_nucleus_equals_float64(top_p: float, vocab_size: int) -> None:
    """Also where it holds tens of thousands of tokens, which float32 sums get wrong."""
    params = SamplingParams(top_p=top_p)
    logits = random_logits(np.random.default_rng(5), 3, vocab_size, 2.0)
    ours = masses(logits, params, 128)
    for row in range(3):
        margin = top_p_margin(logits[row], top_p)
        assert (ours[row] > 0)[margin < -3e-7].all()
        assert not (ours[row] > 0)[margin > 3e-7].any()


@pytest.mark.parametrize("mix", ["top_k_wide", "top_p_k_wide", "xtc_all"])
def test_large_vocabulary_equals_mlx_lm(mix: str) -> None:
    """All steps over a real vocabulary: but for the edge of the nucleus, the same tokens."""
    params = SamplingParams(**MIXES[mix])
    logits = random_logits(np.random.default_rng(6), 2, 30_011, 1.5)
    ours = masses(logits, params, 128)
    for row in range(2):
        kept = np.isfinite(np.array(filtered(logits[row : row + 1], params, SPECIAL, xtc="xtc" in mix))[0])
        assert int(((ours[row] > 0) != kept).sum()) == 0


def test_equal_logits_are_kept_together_by_top_p_and_cut_by_top_k() -> None:
    """top-p keeps ties with its last token, as mlx-lm does; top-k keeps exactly k, the lower ids of equals."""
    logits = mx.array([[2.0, 1.0, 1.0, 1.0, 1.0, 0.0, -mx.inf, -mx.inf]])
    nucleus = masses(logits, SamplingParams(top_p=0.6), 4)[0]
    assert np.flatnonzero(nucleus).tolist() == [0, 1, 2, 3, 4]
    limits = Limits(8, 0, 4, 8)  # no ranked groups
    params = SamplingParams(top_k=3)
    assert need_of(params, limits).method is Method.ALL
    kept = np.array(all_masses(logits, build_columns([params], 8), None, 4))[0]
    assert np.flatnonzero(kept).tolist() == [0, 1, 2]
    assert np.count_nonzero(masses(logits, params, 4)) == 3


def test_neighbours_with_other_filters_change_no_mass() -> None:
    """A row's masses are the same bits in a group where others use every step."""
    rng = np.random.default_rng(3)
    logits = random_logits(rng, 4, 700)
    everyone = [
        SamplingParams(temperature=0.8),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=300, min_p=0.01),
        SamplingParams(xtc_probability=1.0, top_p=0.95, top_k=290),
    ]
    struck = mx.array([[1 << 31], [1 << 31], [1 << 31], [to_fixed(0.1)]], dtype=mx.int64)
    together = np.array(all_masses(logits, build_columns(everyone, 700), Xtc(struck, None), 64))
    for row, params in enumerate(everyone):
        xtc = Xtc(struck[row : row + 1], None) if params.xtc_probability else None
        alone = all_masses(logits[row : row + 1], build_columns([params], 700), xtc, 64)
        assert np.array_equal(np.array(alone)[0], together[row])
