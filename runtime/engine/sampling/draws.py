"""A row's randomness: one 64-bit word per (seed, position), made on the host, whatever the row's neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

UNIFORM_BITS = 31
"""Uniforms are integers in [0, 2**31): finer than float32's 24 bits, and products with masses fit in int64."""

_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
_LOW_BITS = np.uint64((1 << UNIFORM_BITS) - 1)
_WORD = (1 << 64) - 1


def mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): a bijection of 64 bits that flips half of them."""
    words = (words ^ (words >> np.uint64(30))) * _FIRST_FACTOR
    words = (words ^ (words >> np.uint64(27))) * _SECOND_FACTOR
    return words ^ (words >> np.uint64(31))


def hash_seed(seed: int) -> int:
    """The start of a seed's stream: neighbouring seeds start far apart."""
    return int(mix(np.array([seed & _WORD], dtype=np.uint64) + _GOLDEN_RATIO)[0])


def draw(hashes: Sequence[int], positions: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Two uniforms per row, as integers in [0, 2**31).

    Args:
        hashes: `hash_seed` of every row.
        positions: index of the token to be sampled in every row's output.

    Returns:
        One (rows,) array to pick the token and one to decide on XTC.
    """
    starts = np.array(hashes, dtype=np.uint64)
    words = mix(starts + np.array(positions, dtype=np.uint64) * _GOLDEN_RATIO)
    high = (words >> np.uint64(64 - UNIFORM_BITS)).astype(np.int32)
    return high, (words & _LOW_BITS).astype(np.int32)
