"""The host's inverse of a running sum: the same place as the plain one, and never a weight of zero."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_troupe.runtime.engine.sampling.on_host import _first_beyond


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 1000, 1024, 1025, 4999])
def test_as_a_plain_running_sum(size: int) -> None:
    rng = np.random.default_rng(size)
    weights = np.exp(4 * rng.standard_normal((64, size))).astype(np.float32)
    weights[rng.random((64, size)) < 0.5] = 0
    weights[:, rng.integers(size)] = 1  # no row is all zeros
    shares = rng.random((64, 1))
    shares[:4] = 0
    shares[4:8] = 1 - 2.0**-31
    below = np.cumsum(weights, axis=-1, dtype=np.float64)
    plain = (below <= below[:, -1:] * shares).sum(axis=-1)
    found = _first_beyond(weights, shares)
    assert (found == plain).mean() > 0.95, "they differ by rounding alone"
    assert np.allclose(below[np.arange(64), found], below[np.arange(64), np.minimum(plain, size - 1)], rtol=1e-6)
    assert (weights[np.arange(64), found] > 0).all()


def test_one_weight_is_always_found() -> None:
    for size in (1, 5, 64, 1000):
        for place in range(0, size, 7):
            weights = np.zeros((3, size), np.float32)
            weights[:, place] = 1e-30
            assert (_first_beyond(weights, np.array([[0.0], [0.5], [1 - 2.0**-31]])) == place).all()


def test_a_row_without_weight_stays_in_the_vocabulary() -> None:
    assert (_first_beyond(np.zeros((2, 10), np.float32), np.full((2, 1), 0.5)) < 10).all()
