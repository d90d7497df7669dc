"""Whatever the logits, parameters and masks: what is sampled may be sampled."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_troupe.runtime.engine.sampling import RowSampler
from mlx_troupe.runtime.sampling_params import SamplingParams

VOCAB = 70

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-40, 0.3, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 1, 5, 66, 10_000]),
    top_p=st.sampled_from([1.0, 1e-12, 0.4, 0.999999]),
    min_p=st.sampled_from([0.0, 1e-300, 0.1, 1.0]),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.1, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1e-6, 100.0]),
    presence_penalty=st.sampled_from([0.0, 100.0]),
    frequency_penalty=st.sampled_from([0.0, -100.0]),
    logit_bias=st.sampled_from([(), ((0, 1e308), (1, -1e308))]),
    suppressed=st.sampled_from([(), (2, 69)]),
    seed=st.integers(-(2**70), 2**70),
    top_logprobs=st.sampled_from([None, 0, 20]),
)
LOGIT = st.sampled_from([0.0, -0.0, 1.0, -1e4, 1e4, 3e38, -3e38, 1e-40, -np.inf])
BROKEN = st.one_of(LOGIT, st.sampled_from([np.nan, np.inf]))


def logits_of(values: list[list[float]], seed: int, dtype: mx.Dtype) -> mx.array:
    """Random logits with some replaced; (rows, VOCAB)."""
    logits = np.random.default_rng(seed).normal(size=(len(values), VOCAB)).astype(np.float32)
    for row, chosen in enumerate(values):
        logits[row, : len(chosen)] = chosen
    return mx.array(logits).astype(dtype)


ROWS = st.lists(st.tuples(PARAMS, st.lists(BROKEN, max_size=VOCAB)), min_size=1, max_size=5)
DTYPE = st.sampled_from([mx.float32, mx.bfloat16, mx.float16])


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, dtype=DTYPE, seed=st.integers(0, 99))
def test_broken_logits_never_leave_the_vocabulary(
    rows: list[tuple[SamplingParams, list[float]]], dtype: mx.Dtype, seed: int
) -> None:
    """NaN and infinities included."""
    sampler = RowSampler(VOCAB, xtc_special=(3,))
    for row, (params, _) in enumerate(rows):
        sampler.join(row, params, [1, 2, 2], 0)
    for _ in range(2):
        logits = logits_of([values for _, values in rows], seed, dtype)
        tokens = np.array(sampler.sample(logits, list(range(len(rows)))).tokens)
        assert ((tokens >= 0) & (tokens < VOCAB)).all()


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, dtype=DTYPE, seed=st.integers(0, 99), share=st.sampled_from([0.0, 0.02, 0.5, 1.0]))
def test_masks_hold_whatever_the_logits(
    rows: list[tuple[SamplingParams, list[float]]], dtype: mx.Dtype, seed: int, share: float
) -> None:
    """Each row's mask leaves at least one token; broken logits and every filter included."""
    rng = np.random.default_rng(seed)
    allowed = rng.random((len(rows), VOCAB)) < share
    allowed[np.arange(len(rows)), rng.integers(0, VOCAB, len(rows))] = True
    padded = np.zeros((len(rows), 96), dtype=bool)
    padded[:, :VOCAB] = allowed
    words = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    sampler = RowSampler(VOCAB)
    for row, (params, _) in enumerate(rows):
        sampler.join(row, params, [5, 6], 0)
    logits = logits_of([values for _, values in rows], seed, dtype)
    tokens = np.array(sampler.sample(logits, list(range(len(rows))), allowed=mx.array(words)).tokens)
    assert allowed[np.arange(len(rows)), tokens].all()


@settings(max_examples=60, deadline=None)
@given(params=PARAMS, values=st.lists(LOGIT, max_size=VOCAB - 2), seed=st.integers(0, 99))
def test_impossible_and_suppressed_tokens_are_never_sampled(
    params: SamplingParams, values: list[float], seed: int
) -> None:
    """A logit of -inf has no chance, nor has a suppressed token, while there is another."""
    sampler = RowSampler(VOCAB)
    sampler.join(0, params, [], 0)
    logits = logits_of([values], seed, mx.float32)
    token = int(sampler.sample(logits, [0]).tokens.item())
    assert logits[0, token].item() != -np.inf
    assert token not in params.suppressed


@pytest.mark.parametrize("temperature", [1e-40, 1e-6, 0.01])
def test_cold_rows_are_greedy(temperature: float) -> None:
    """Without a division by zero."""
    logits = mx.array(np.random.default_rng(0).normal(size=(1, VOCAB)).astype(np.float32))
    sampler = RowSampler(VOCAB)
    sampler.join(0, SamplingParams(temperature=temperature), [], 0)
    assert sampler.sample(logits, [0]).tokens.tolist() == mx.argmax(logits, axis=-1).tolist()
