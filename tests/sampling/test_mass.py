"""The integer arithmetic and the random words below everything else."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_troupe.runtime.engine.sampling.draws import UNIFORM_BITS, draw, hash_seed, mix
from mlx_troupe.runtime.engine.sampling.mass import UNIT, decay, pick, share_of, to_fixed, to_mass

LAST = (1 << UNIFORM_BITS) - 1


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's statistic in standard deviations above its mean, for many cells."""
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = observed.size - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("columns", [64, 1000])
def test_decay_is_exp(columns: int) -> None:
    """Both ways of computing it, over all that a mass can express."""
    excess = np.linspace(0, 29, columns, dtype=np.float32)
    found = np.array(decay(mx.array(excess)[None]))[0]
    np.testing.assert_allclose(found, np.exp(-excess.astype(np.float64)), rtol=2e-6)
    edges = mx.array([[0.0, 1e-30, 100.0, 1e30, np.inf] + [0.0] * columns])
    assert np.array(to_mass(decay(edges)))[0, :5].tolist() == [int(UNIT), int(UNIT), 0, 0, 0]


def test_share_of_is_exact() -> None:
    """Against Python's integers, up to the largest total."""
    rng = np.random.default_rng(0)
    totals = [*rng.integers(0, 1 << 62, size=200).tolist(), 0, 1, (1 << 62) - 1]
    shares = [*rng.integers(0, 1 << 31, size=200).tolist(), 1 << 31, LAST, 1 << 31]
    found = share_of(mx.array(totals, dtype=mx.int64), mx.array(shares, dtype=mx.int64))
    assert np.array(found).tolist() == [total * share >> 31 for total, share in zip(totals, shares, strict=True)]
    assert to_fixed(1.0) == 1 << 31


@pytest.mark.parametrize("uniform", [0, 1, LAST // 2, LAST - 1, LAST])
def test_extreme_uniforms_never_pick_a_token_of_mass_zero(uniform: int) -> None:
    """At both ends, and where whole stretches weigh nothing or next to nothing."""
    rng = np.random.default_rng(uniform)
    masses = rng.integers(0, int(UNIT), size=(64, 300))
    masses[rng.random((64, 300)) < 0.9] = 0
    masses[:16] = np.minimum(masses[:16], 1)
    masses[:, 0] = masses[:, -1] = 0
    masses[:, 150] = 1
    columns = np.array(pick(mx.array(masses), mx.full((64, 1), uniform, dtype=mx.int64)))
    assert (np.take_along_axis(masses, columns[:, None], axis=1) > 0).all()
    empty = pick(mx.zeros((2, 7), dtype=mx.int64), mx.full((2, 1), uniform, dtype=mx.int64))
    assert empty.tolist() == [6, 6]


def test_pick_follows_the_masses() -> None:
    """Evenly spaced uniforms pick each token in proportion."""
    masses = np.array([3, 0, 1, 6]) * int(UNIT)
    uniforms = ((2 * np.arange(1000, dtype=np.int64) + 1) << 31) // 2000
    columns = pick(mx.array(np.tile(masses, (1000, 1))), mx.array(uniforms[:, None]))
    assert np.bincount(np.array(columns), minlength=4).tolist() == [300, 0, 100, 600]


def test_draws_are_uniform_and_independent() -> None:
    """Along positions, across neighbouring seeds, and between a row's two uniforms."""
    for hashes, positions in (
        ([hash_seed(7)] * 65_536, range(65_536)),
        ([hash_seed(seed) for seed in range(4096)] * 16, [i // 4096 for i in range(65_536)]),
    ):
        first, second = draw(hashes, positions)
        cells = np.full((32, 32), 65_536 / 1024)
        for one, other in ((first, second), (first[1:], first[:-1]), (second[1:], second[:-1])):
            table = np.histogram2d(one >> 26, other >> 26, bins=(range(33), range(33)))[0]
            assert abs(chi_square(table, cells * one.size / 65_536)) < 4
        low = np.bincount(first & 1023, minlength=1024)
        assert abs(chi_square(low, np.full(1024, 64.0))) < 4
        assert first.min() >= 0


def test_draws_depend_on_seed_and_position_alone() -> None:
    """Whatever stands beside them; any integer is a seed."""
    seeds, positions = [0, 5, 5, -1, 1 << 70, 2**64 + 5], [0, 9, 10, 3, 4, 9]
    together = draw([hash_seed(seed) for seed in seeds], positions)
    for i, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        alone = draw([hash_seed(seed)], [position])
        assert (alone[0][0], alone[1][0]) == (together[0][i], together[1][i])
    assert together[0][1] == together[0][5]  # seeds are taken modulo 2**64
    assert len(set(together[0].tolist())) == 5


def test_mix_is_splitmix64() -> None:
    """The first outputs of the published generator for state 1234567."""
    state = np.array([1234567], dtype=np.uint64)
    golden = np.uint64(0x9E3779B97F4A7C15)
    outputs = mix(state + np.arange(1, 4, dtype=np.uint64) * golden)
    assert outputs.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
