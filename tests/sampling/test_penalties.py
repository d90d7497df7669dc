"""Penalties, biases, masks and suppressed tokens against mlx-lm's logits processors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import pytest

from mlx_troupe.runtime.engine.sampling import RowSampler
from mlx_troupe.runtime.sampling_params import SamplingParams

from .reference import processed, random_logits

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB = 97


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Greedy with random penalties, each neutral at times, over windows shorter and longer than any history."""
    return SamplingParams(
        temperature=0.0,
        repetition_penalty=float(rng.choice([1.0, 1.3, 0.8, 5.0])),
        repetition_window=int(rng.choice([1, 5, 20, 300])),
        presence_penalty=float(rng.choice([0.0, 0.5, -1.0])),
        presence_window=int(rng.choice([1, 7, 20, 600])),
        frequency_penalty=float(rng.choice([0.0, 0.3, -0.2])),
        frequency_window=int(rng.choice([2, 20, 50])),
        logit_bias=tuple((int(token), float(rng.normal())) for token in rng.choice(VOCAB, 3, replace=False)),
        top_logprobs=VOCAB,
    )


def edited(sampler: RowSampler, logits: mx.array, rows: Sequence[int | None]) -> np.ndarray:
    """Log-softmax of the logits as the sampler changes them, by way of its log-probabilities; (rows that ask, V)."""
    sampled = sampler.sample(logits, rows)
    mx.eval(sampled.arrays(), sampler.extra())
    found = sampled.logprobs
    assert found is not None
    assert found.top_ids is not None
    placed = mx.put_along_axis(mx.zeros(found.top_ids.shape), found.top_ids, found.top_logprobs, axis=-1)
    return np.array(placed)


def log_softmax(logits: mx.array) -> np.ndarray:
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def test_penalties_equal_mlx_lm_step_by_step() -> None:
    """Rows of all settings together, histories of 1-400 tokens, 30 steps, so that windows fill and move on."""
    rng = np.random.default_rng(11)
    params = [random_params(rng) for _ in range(24)]
    histories = [rng.integers(0, VOCAB, size=int(rng.choice([1, 3, 25, 400]))).tolist() for _ in params]
    sampler = RowSampler(VOCAB)
    for row, (own, history) in enumerate(zip(params, histories, strict=True)):
        sampler.join(row, own, history, 0)
    rows = list(range(24))
    for _ in range(30):
        logits = random_logits(rng, 24, VOCAB)
        before = np.array(logits)
        sampled = sampler.sample(logits, rows)
        mx.eval(sampled.arrays(), sampler.extra())
        assert np.array_equal(np.array(logits), before)  # the caller's array is not written to
        assert sampled.logprobs is not None
        ids, values = np.array(sampled.logprobs.top_ids), np.array(sampled.logprobs.top_logprobs)
        for row in rows:
            expected = log_softmax(processed(logits[row : row + 1], params[row], histories[row]))[0]
            np.testing.assert_allclose(values[row], expected[ids[row]], atol=1e-5)
            token = int(sampled.tokens[row].item())
            assert expected[token] >= expected.max() - 1e-5
            histories[row].append(token)


def test_windows_survive_joins_leaves_and_pauses() -> None:
    """Rows change slots, pause and return; each still sees exactly its own last tokens."""
    rng = np.random.default_rng(2)
    params = [
        SamplingParams(temperature=0.0, presence_penalty=2.0, presence_window=6, top_logprobs=0),
        SamplingParams(temperature=0.0, repetition_penalty=1.5, repetition_window=3),
        SamplingParams(temperature=0.0, frequency_penalty=1.0, frequency_window=500),
        SamplingParams(temperature=0.0),
    ]
    sampler = RowSampler(VOCAB)
    histories: dict[int, list[int]] = {}
    for step in range(60):
        row = int(rng.integers(0, 8))
        if row in histories and rng.random() < 0.3:
            sampler.leave(row)
            del histories[row]
        elif row not in histories:
            histories[row] = rng.integers(0, VOCAB, size=step % 9 + 1).tolist()
            sampler.join(row, params[row % 4], histories[row], 0)
        live = rng.permutation(list(histories)).tolist()[: 1 + step % 6]
        rows = [*live, None] if step % 3 == 0 else live
        logits = random_logits(rng, len(rows), VOCAB)
        sampled = sampler.sample(logits, rows)
        mx.async_eval(sampled.arrays(), sampler.extra())
        for slot, row in enumerate(live):
            expected = processed(logits[slot : slot + 1], params[row % 4], histories[row])
            token = int(sampled.tokens[slot].item())
            assert token == int(mx.argmax(expected).item())
            histories[row].append(token)


def test_rewound_window_forgets_the_rejected_tokens() -> None:
    """Rounds of five samples with three rejected equal a history without them; too deep asks for a resync."""
    rng = np.random.default_rng(4)
    params = SamplingParams(temperature=0.0, frequency_penalty=0.7, frequency_window=30, top_logprobs=VOCAB)
    history = rng.integers(0, VOCAB, size=90).tolist()
    sampler = RowSampler(VOCAB)
    sampler.join(3, params, history, 0)
    for _ in range(12):
        for _ in range(5):
            sampled = sampler.sample(random_logits(rng, 1, VOCAB), [3])
            history.append(int(sampled.tokens.item()))
        sampler.rewind(3, 3)
        del history[-3:]
        logits = random_logits(rng, 1, VOCAB)
        expected = log_softmax(processed(logits, params, history))
        np.testing.assert_allclose(edited(sampler, logits, [3]), expected, atol=1e-5)
        history.append(int(expected.argmax()))
    sampler.rewind(3, 20)
    with pytest.raises(ValueError, match="resync"):
        sampler.rewind(3, 14)
    sampler.resync(3, history[:50], 0)
    logits = random_logits(rng, 1, VOCAB)
    expected = log_softmax(processed(logits, params, history[:50]))
    np.testing.assert_allclose(edited(sampler, logits, [3]), expected, atol=1e-5)


def test_history_may_be_empty_or_hold_foreign_ids() -> None:
    """Ids outside the vocabulary (image placeholders, say) are skipped; nothing is read outside the logits."""
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0, presence_penalty=1.0, top_logprobs=VOCAB)
    rng = np.random.default_rng(9)
    for history, seen in (([], []), ([-1, VOCAB, 10**12], []), ([5, 10**12, 7, -3], [5, 7])):
        sampler = RowSampler(VOCAB)
        sampler.join(0, params, history, 0)
        logits = random_logits(rng, 1, VOCAB)
        expected = log_softmax(processed(logits, params, seen)) if seen else log_softmax(logits)
        np.testing.assert_allclose(edited(sampler, logits, [0]), expected, atol=1e-5)


def test_bias_mask_and_suppressed_tokens() -> None:
    """In 16-bit logits too; a mask wins over everything else."""
    logits = mx.zeros((3, 40)).astype(mx.bfloat16)
    sampler = RowSampler(40)
    sampler.join(0, SamplingParams(temperature=0.0, logit_bias=((7, 5.0), (7, 1.0), (8, 5.5))), [], 0)
    sampler.join(1, SamplingParams(temperature=0.0, logit_bias=((7, 5.0),), suppressed=(7, 0)), [], 0)
    sampler.join(2, SamplingParams(temperature=0.0, logit_bias=((39, 1e300),), suppressed=(33,)), [], 0)
    assert sampler.sample(logits, [0, 1, 2]).tokens.tolist() == [7, 1, 39]
    bits = np.zeros((3, 2), dtype=np.uint32)
    bits[0] = [1 << 8 | 1 << 9, 0]
    bits[1] = [1 << 7, 0]  # the mask leaves a suppressed token only
    bits[2] = [0, 1 << 1]
    for allowed in (mx.array(bits), mx.array(bits.view(np.int32))):
        assert sampler.sample(logits, [0, 1, 2], allowed=allowed).tokens.tolist() == [8, 7, 33]
