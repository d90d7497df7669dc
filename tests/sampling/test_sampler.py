"""Rows together: distributions, independence of company, membership, and the invariants of the sampler's module."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_troupe.runtime.engine.sampling import RowSampler
from mlx_troupe.runtime.engine.sampling import sampler as sampler_module
from mlx_troupe.runtime.sampling_params import SamplingParams

from .reference import distribution, random_logits, run, solo

NEEDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "min_p": {"min_p": 0.02},
    "top_p": {"top_p": 0.9, "temperature": 1.2},
    "top_k": {"top_k": 12},
    "top_k_wide": {"top_k": 300},
    "top_k_p": {"top_k": 90, "top_p": 0.9},
    "xtc": {"xtc_probability": 0.4, "xtc_threshold": 0.04},
    "xtc_all": {"xtc_probability": 0.7, "xtc_threshold": 0.03, "top_p": 0.95, "top_k": 20},
    "penalised": {"repetition_penalty": 1.2, "frequency_penalty": 0.1},
    "biased": {"logit_bias": ((3, 2.0), (4, -1.0)), "suppressed": (5,)},
    "logprobs": {"top_logprobs": 3},
}


def params_of(need: str, seed: int) -> SamplingParams:
    return SamplingParams(seed=seed, **NEEDS[need])


@pytest.mark.parametrize("need", ["temperature", "min_p", "top_p", "top_k", "top_k_wide", "xtc", "xtc_all"])
def test_draws_follow_mlx_lm_distribution(need: str) -> None:
    """Chi-square over 9,600 draws of 32 seeds, logits fixed."""
    vocab_size = 60
    logits = random_logits(np.random.default_rng(8), 1, vocab_size, 1.5)
    expected = distribution(logits, params_of(need, 0))
    sampler = RowSampler(vocab_size)
    rows = list(range(32))
    for row in rows:
        sampler.join(row, params_of(need, 1000 + row), [], 0)
    batch = mx.broadcast_to(logits, (32, vocab_size))
    counts = np.bincount(run(sampler, [batch] * 300, rows).ravel(), minlength=vocab_size)
    assert (counts[expected == 0] == 0).all()
    likely = expected > 1e-3
    observed, share = np.append(counts[likely], counts[~likely].sum()), np.append(expected[likely], 1e-12)
    share[-1] += expected[~likely].sum()
    wanted = share * counts.sum()
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    freedom = max(1, int(likely.sum()) - 1)
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize(("vocab_size", "steps"), [(512, 240), (1531, 24), (20_011, 4)])
def test_rows_do_not_depend_on_their_neighbours(vocab_size: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 2: the same row alone and in batches of 2, 7 and 32, at other slots, among all kinds of rows."""
    if vocab_size > 512:
        monkeypatch.setattr(sampler_module, "_CPU_BLOCK_VALUES", 3 * vocab_size)
    rng = np.random.default_rng(21)
    names = list(NEEDS)
    own = [random_logits(rng, len(names), vocab_size) for _ in range(steps)]
    history = [1, 2, 3, 2]
    alone = {
        name: solo(vocab_size, params_of(name, 77), [logits[i : i + 1] for logits in own], history)
        for i, name in enumerate(names)
    }
    for batch in (2, 7, 32):
        sampler = RowSampler(vocab_size)
        watched = rng.permutation(len(names)).tolist()[: max(1, batch // 2)]
        slots = rng.permutation(batch).tolist()[: len(watched)]
        for i in watched:
            sampler.join(i, params_of(names[i], 77), history, 0)
        rows: list[int | None] = [None if slot % 5 == 4 else 100 + slot for slot in range(batch)]
        for slot, i in zip(slots, watched, strict=True):
            rows[slot] = i
        for row in [row for row in rows if row is not None and row >= 100]:
            sampler.join(row, params_of(names[row % len(names)], row), [row], row)
        noise = random_logits(rng, batch, vocab_size)
        index = mx.array(slots)[:, None]
        placed = [mx.put_along_axis(noise, index, logits[mx.array(watched)], axis=0) for logits in own]
        tokens = run(sampler, placed, rows)
        for slot, i in zip(slots, watched, strict=True):
            assert tokens[:, slot].tolist() == alone[names[i]], names[i]


def test_two_runs_are_alike_and_seeds_differ() -> None:
    """Determinism, and that another seed is another text."""
    steps = [random_logits(np.random.default_rng(step), 1, 300) for step in range(50)]
    for need in NEEDS:
        assert solo(300, params_of(need, 1), steps) == solo(300, params_of(need, 1), steps)
    assert solo(300, params_of("temperature", 1), steps) != solo(300, params_of("temperature", 2), steps)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_16_bit_logits_are_sampled_as_float32(dtype: mx.Dtype) -> None:
    """The same tokens as from the same values in float32."""
    steps = [random_logits(np.random.default_rng(step), 1, 300).astype(dtype) for step in range(20)]
    for need in NEEDS:
        wide = [logits.astype(mx.float32) for logits in steps]
        assert solo(300, params_of(need, 4), steps) == solo(300, params_of(need, 4), wide)


def test_rows_join_and_leave_midway() -> None:
    """A row that joins at some position, pauses, moves and leaves samples what it samples alone."""
    rng = np.random.default_rng(6)
    steps = [random_logits(rng, 6, 200) for _ in range(40)]
    names = ["temperature", "top_p", "greedy", "penalised", "top_k", "xtc"]
    expected = [
        solo(200, params_of(name, i), [logits[i : i + 1] for logits in steps], [i]) for i, name in enumerate(names)
    ]
    sampler = RowSampler(200)
    done = [0] * 6
    joined: set[int] = set()
    while any(done[i] < 40 for i in range(6)):
        row = int(rng.integers(0, 6))
        if row not in joined and done[row] < 40:
            sampler.join(row, params_of(names[row], row), [row, *expected[row][: done[row]]], done[row])
            joined.add(row)
        elif row in joined and rng.random() < 0.2:
            sampler.leave(row)
            joined.discard(row)
        batch = [i for i in rng.permutation(sorted(joined)).tolist() if done[i] < 40 and rng.random() < 0.8]
        if not batch:
            continue
        logits = mx.stack([steps[done[i]][i] for i in batch])
        sampled = sampler.sample(logits, batch)
        mx.eval(sampled.arrays(), sampler.extra())
        for i, token in zip(batch, sampled.tokens.tolist(), strict=True):
            assert token == expected[i][done[i]]
            done[i] += 1


def test_rewind_and_resync_repeat_the_draws() -> None:
    """After a rewind the same positions draw the same tokens from the same logits."""
    steps = [random_logits(np.random.default_rng(step), 1, 100) for step in range(10)]
    sampler = RowSampler(100)
    sampler.join(0, params_of("temperature", 5), [], 0)
    first = run(sampler, steps, [0])
    sampler.rewind(0, 4)
    assert np.array_equal(run(sampler, steps[6:], [0]), first[6:])
    sampler.resync(0, [], 2)
    assert np.array_equal(run(sampler, steps[2:], [0]), first[2:])
    with pytest.raises(ValueError, match="position"):
        sampler.rewind(0, 11)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_suppress_until_ends_at_its_position(temperature: float) -> None:
    """Exactly then, also after a rewind back across it, and in the company of rows without it."""
    logits = mx.array([[9.0] + [0.0] * 31] * 2) * 2
    sampler = RowSampler(32)
    for row in (0, 1):
        sampler.join(row, SamplingParams(temperature=temperature, seed=3), [], 0)
    sampler.suppress_until(0, (0, 4), 5)
    tokens = run(sampler, [logits] * 8, [0, 1])
    assert (tokens[:5, 0] != 0).all()
    assert (tokens[:5, 0] != 4).all()
    assert (tokens[5:, 0] == 0).all()
    assert (tokens[:, 1] == 0).all()
    sampler.rewind(0, 6)
    again = run(sampler, [logits] * 6, [0, 1])
    assert np.array_equal(again[:, 0], tokens[2:, 0])


@pytest.mark.parametrize("block_rows", [2, 100])
def test_logprobs_are_those_of_the_edited_logits(block_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Untempered and unfiltered, for the rows that ask and no others."""
    monkeypatch.setattr(sampler_module, "_CPU_BLOCK_VALUES", 50 * block_rows)
    logits = random_logits(np.random.default_rng(1), 5, 50)
    sampler = RowSampler(50)
    asked = {1: 4, 3: 0, 4: 20}
    for row in range(5):
        sampler.join(row, SamplingParams(top_p=0.5, temperature=0.3, seed=row, top_logprobs=asked.get(row)), [], 0)
    sampled = sampler.sample(logits, [4, 0, None, 1, 3])
    found = sampled.logprobs
    assert found is not None
    assert found.slots == (0, 3, 4)
    assert found.top_counts == (20, 4, 0)
    assert len(sampled.arrays()) == 4
    expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    for i, slot in enumerate(found.slots):
        np.testing.assert_allclose(found.chosen[i].item(), expected[slot, sampled.tokens[slot].item()], atol=2e-6)
        best = np.argsort(-expected[slot])[:20]
        assert np.array(found.top_ids)[i].tolist() == best.tolist()
        np.testing.assert_allclose(np.array(found.top_logprobs)[i], expected[slot, best], atol=2e-6)
    only_chosen = sampler.sample(logits[:1], [3]).logprobs
    assert only_chosen is not None
    assert only_chosen.top_ids is None
    assert sampler.sample(logits[:1], [0]).logprobs is None


def test_nothing_is_evaluated() -> None:
    """Invariant 1: building a step over logits that would take 32 MiB allocates next to nothing."""
    sampler = RowSampler(1 << 20, on_host=False)
    for row, need in enumerate(NEEDS):
        sampler.join(row, params_of(need, row), [1, 2], 0)
    rows = list(range(len(NEEDS)))
    before = mx.get_active_memory()
    sampled = sampler.sample(mx.zeros((len(rows), 1 << 20)), rows)
    assert mx.get_active_memory() - before < 1 << 20
    assert sampled.tokens.dtype == mx.int32
    assert len(sampler.extra()) == 1


def test_steady_steps_build_no_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 3: one plan from one change of membership to the next."""
    built = 0
    original = RowSampler._build_plan

    def counting(self: RowSampler, slots: tuple[int | None, ...]) -> object:
        nonlocal built
        built += 1
        return original(self, slots)

    monkeypatch.setattr(RowSampler, "_build_plan", counting)
    sampler = RowSampler(64)
    for row, need in enumerate(NEEDS):
        sampler.join(row, params_of(need, row), [], 0)
    rows: list[int | None] = list(range(len(NEEDS)))
    logits = mx.zeros((len(rows), 64))
    for _ in range(20):
        sampler.sample(logits, rows)
    sampler.rewind(0, 2)  # no penalties: the plan stays
    sampler.sample(logits, rows)
    assert built == 1
    sampler.leave(2)
    rows[2] = None
    sampler.sample(logits, rows)
    sampler.sample(logits, rows)
    assert built == 2
    sampler.sample(logits, rows[::-1])
    assert built == 3


def test_misuse_is_refused() -> None:
    """Wrong shapes, unknown and doubled rows, and vocabularies beyond the arithmetic."""
    sampler = RowSampler(8)
    sampler.join(0, SamplingParams(), [], 0)
    with pytest.raises(ValueError, match="joined already"):
        sampler.join(0, SamplingParams(), [], 0)
    with pytest.raises(ValueError, match="shape"):
        sampler.sample(mx.zeros((1, 9)), [0])
    with pytest.raises(ValueError, match="more than one slot"):
        sampler.sample(mx.zeros((2, 8)), [0, 0])
    with pytest.raises(KeyError):
        sampler.sample(mx.zeros((1, 8)), [1])
    with pytest.raises(KeyError):
        sampler.leave(1)
    with pytest.raises(ValueError, match="vocab_size"):
        RowSampler(1 << 21)
    assert sampler.sample(mx.zeros((2, 8)), [None, None]).tokens.shape == (2,)
