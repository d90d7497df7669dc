"""What mlx-lm would do, as distributions rather than draws, and drivers shared by the tests."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc, make_logits_processors

from mlx_troupe.runtime.engine.sampling import RowSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_troupe.runtime.sampling_params import SamplingParams


def filtered(logits: mx.array, params: SamplingParams, special: Sequence[int] = (), *, xtc: bool = False) -> mx.array:
    """Log-probabilities after make_sampler's chain, XTC struck or not; (1, V)."""
    steps = []
    if 0.0 < params.top_p < 1.0:
        steps.append(partial(apply_top_p, top_p=params.top_p))
    if params.min_p > 0.0:
        steps.append(partial(apply_min_p, min_p=params.min_p))
    if xtc:
        chance = {"xtc_probability": 1.0, "xtc_threshold": params.xtc_threshold}
        steps.append(partial(apply_xtc, **chance, xtc_special_tokens=list(special)))
    if 0 < params.top_k < logits.shape[-1]:
        steps.append(partial(apply_top_k, top_k=params.top_k))
    values = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for step in steps:
        values = step(values)
    return values


def distribution(logits: mx.array, params: SamplingParams, special: Sequence[int] = ()) -> np.ndarray:
    """Probabilities of a token under mlx-lm's make_sampler; (V,) float64."""

    def tempered(values: mx.array) -> np.ndarray:
        scaled = np.array(values, dtype=np.float64)[0] / params.temperature
        weights = np.exp(scaled - scaled.max())
        return weights / weights.sum()

    untouched = tempered(filtered(logits, params, special))
    if params.xtc_probability == 0.0:
        return untouched
    struck = tempered(filtered(logits, params, special, xtc=True))
    return params.xtc_probability * struck + (1.0 - params.xtc_probability) * untouched


def processed(logits: mx.array, params: SamplingParams, history: Sequence[int]) -> mx.array:
    """(1, V) logits after make_logits_processors' chain."""
    processors = make_logits_processors(
        dict(params.logit_bias),
        params.repetition_penalty if params.repetition_penalty != 1.0 else None,
        params.repetition_window,
        params.presence_penalty,
        params.presence_window,
        params.frequency_penalty,
        params.frequency_window,
    )
    logits = mx.array(np.array(logits))  # mlx-lm's processors change logits in place
    for processor in processors:
        logits = processor(mx.array(list(history)), logits)
    return logits


def random_logits(rng: np.random.Generator, rows: int, vocab_size: int, spread: float = 3.0) -> mx.array:
    """Logits of no special shape; (rows, V) float32."""
    return mx.array(rng.normal(size=(rows, vocab_size)).astype(np.float32) * spread)


def run(sampler: RowSampler, steps: Sequence[mx.array], rows: Sequence[int | None]) -> np.ndarray:
    """Sample step after step, chained lazily as the engine does; (steps, B)."""
    tokens = []
    for logits in steps:
        sampled = sampler.sample(logits, rows)
        mx.async_eval(sampled.arrays(), sampler.extra())
        tokens.append(sampled.tokens)
    return np.array(mx.stack(tokens))


def solo(vocab_size: int, params: SamplingParams, steps: Sequence[mx.array], history: Sequence[int] = ()) -> list[int]:
    """One row alone in a sampler of its own, from position 0."""
    sampler = RowSampler(vocab_size)
    sampler.join(0, params, history, 0)
    return run(sampler, steps, [0])[:, 0].tolist()
