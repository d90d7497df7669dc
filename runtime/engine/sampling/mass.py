"""Probability mass in integers, and the two operations on it that sampling needs: cut and pick.

Why integers: sums of integers do not depend on the order of addition, so a row's totals, thresholds and picks are the
same bits whatever kernel and whatever batch shape computes them, and a token of weight zero is never picked.

Weights are relative to the row's best token, exp(logit - best) in [0, 1], and a mass is that times 2**42, rounded
down. Sums stay below 2**62 for vocabularies up to 2**20. (B, 1) arrays of totals and limits broadcast over rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mlx.core as mx

from .draws import UNIFORM_BITS

if TYPE_CHECKING:
    from collections.abc import Callable

UNIT = 2.0**42
"""Mass of a row's best token."""
ENDLESS = 1 << 62
"""More than any total."""

_LOW_BITS = (1 << UNIFORM_BITS) - 1
_LOWEST_EXPONENT = -120.0
_NARROW_COLUMNS = 256  # below, twenty operations cost more than twelve nanoseconds a value
# 2**f on [-0.5, 0.5] with 2**0 exact: minimax in relative error (9e-8), highest power first.
_EXP2 = (1.32647272e-3, 9.67151264e-3, 5.55073374e-2, 2.40222421e-1, 6.93146978e-1, 1.0)


def decay(excess: mx.array) -> mx.array:
    """exp(-excess) for (B, n) excess >= 0; relative error below 2e-6 for what a mass can express."""
    if excess.shape[-1] > _NARROW_COLUMNS and mx.default_device() == mx.cpu:
        return _decay_in_simd(excess)
    return mx.exp(-excess)


def _decay_in_simd(excess: mx.array) -> mx.array:
    """The same by 2**n * 2**f: MLX's CPU exp is scalar (12-17 ns a value), these operations are not (4 ns)."""
    power = mx.maximum(excess * -math.log2(math.e), _LOWEST_EXPONENT)
    whole = mx.floor(power + 0.5)
    fraction = power - whole
    value = fraction * _EXP2[0] + _EXP2[1]
    for coefficient in _EXP2[2:]:
        value = value * fraction + coefficient
    return (value.view(mx.int32) + (whole.astype(mx.int32) << 23)).view(mx.float32)


def to_mass(weights: mx.array) -> mx.array:
    """Weights in [0, 1], float32, as int64 masses."""
    return (weights * UNIT).astype(mx.int64)


def to_fixed(share: float) -> int:
    """A share in [0, 1] for `share_of`, rounded down, so that sums that meet a decimal share exactly count as met."""
    return int(share * (1 << UNIFORM_BITS))


def share_of(total: mx.array, fixed: mx.array) -> mx.array:
    """floor(total * fixed / 2**31), exactly.

    Args:
        total: int64 mass in [0, 2**62).
        fixed: int64 in [0, 2**31].
    """
    high, low = total >> UNIFORM_BITS, total & _LOW_BITS
    return high * fixed + ((low * fixed) >> UNIFORM_BITS)


def pick(masses: mx.array, uniforms: mx.array) -> mx.array:
    """Invert the cumulative distribution: one uniform a row.

    Args:
        masses: (B, n) int64, >= 0.
        uniforms: (B, 1) int64 in [0, 2**31).

    Returns:
        (B,) int32 columns; each has mass > 0 unless its whole row has none.
    """
    below = mx.cumsum(masses, axis=-1)
    target = share_of(below[:, -1:], uniforms)
    column = (below <= target).sum(axis=-1)
    return mx.minimum(column, masses.shape[-1] - 1).astype(mx.int32)


def cut(values: mx.array, weigh: Callable[[mx.array], mx.array], limit: mx.array, sort_limit: int) -> mx.array:
    """The least value that stays when values are taken from the top until `limit` is reached.

    A value stays if those above it weigh less than the limit. Found by halving: partition about the middle, weigh the
    upper half, go on in the half where the limit is met; about two partitions' work in all, against a full sort.

    Args:
        values: (B, V) float32.
        weigh: maps values to their int64 weights.
        limit: (B, 1) int64, > 0.
        sort_limit: at most so many values are sorted.

    Returns:
        (B, 1) thresholds; equal values stay or go together.
    """
    above = mx.zeros_like(limit)
    while (count := values.shape[-1]) > sort_limit:
        half = (count + 1) // 2
        values = mx.partition(values, half, axis=-1)
        through_upper = above + weigh(values[:, half:]).sum(axis=-1, keepdims=True)
        met = through_upper >= limit
        values = mx.where(met, values[:, count - half :], values[:, :half])
        above = mx.where(met, above, through_upper)
    falling = mx.sort(values, axis=-1)[:, ::-1]
    weights = weigh(falling)
    stays = above + mx.cumsum(weights, axis=-1) - weights < limit
    return mx.where(stays, falling, math.inf).min(axis=-1, keepdims=True)


def count(values: mx.array) -> mx.array:
    """Weights of one each: `cut` then counts values."""
    return mx.ones(values.shape, dtype=mx.int64)
