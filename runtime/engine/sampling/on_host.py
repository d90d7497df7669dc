"""The same filters and draw on the host, for MLX's CPU backend.

There the device is the host: a pass of a hundred small MLX operations costs a hand-over between threads each, and MLX's
sort and exp are scalar, while numpy's are vectorised (32 rows of 1,000: 0.8 ms against 1.6 alone and 3 beside a busy
event loop). The order of the steps and the masses' meaning are those of `filters` and `mass`; weights are float64
sums of float32 terms, row by row, so a row's tokens do not depend on its neighbours.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .draws import UNIFORM_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ...sampling_params import SamplingParams

_COLDEST = 1e-30
_NEVER = 1 << UNIFORM_BITS
_NOTHING = np.float32(0)


class HostColumns(NamedTuple):
    """Parameters of a group's rows, (rows, 1) each; None where no row needs the step.

    Attributes:
        coldness: 1 / temperature, float32.
        top_p: share to keep, float64; 2 keeps all.
        floor: least weight that min-p keeps, float32.
        top_k: int64; the vocabulary's size keeps all.
        xtc_probability: as an integer share of 2**31.
        xtc_threshold: float64.
    """

    coldness: NDArray[np.float32]
    top_p: NDArray[np.float64] | None
    floor: NDArray[np.float32] | None
    top_k: NDArray[np.int64] | None
    xtc_probability: NDArray[np.float64] | None
    xtc_threshold: NDArray[np.float64] | None


def host_columns(params: Sequence[SamplingParams], vocab_size: int) -> HostColumns:
    """The parameters of a group's rows on the host."""

    def column(values: list[float], dtype: type) -> NDArray[np.generic]:
        return np.array(values, dtype=dtype)[:, None]

    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    xtc = any(p.xtc_probability > 0 for p in params)
    return HostColumns(
        coldness=column([1.0 / max(p.temperature, _COLDEST) for p in params], np.float32),  # type: ignore[arg-type]
        top_p=column([p.top_p if p.top_p < 1 else 2.0 for p in params], np.float64)  # type: ignore[arg-type]
        if any(p.top_p < 1 for p in params)
        else None,
        floor=column([p.min_p for p in params], np.float32) if any(p.min_p > 0 for p in params) else None,  # type: ignore[arg-type]
        top_k=column(top_k, np.int64) if min(top_k) < vocab_size else None,  # type: ignore[arg-type]
        xtc_probability=column([p.xtc_probability * _NEVER for p in params], np.float64) if xtc else None,  # type: ignore[arg-type]
        xtc_threshold=column([p.xtc_threshold for p in params], np.float64) if xtc else None,  # type: ignore[arg-type]
    )


def sample_on_host(
    logits: NDArray[np.float32],
    columns: HostColumns,
    picks: NDArray[np.int64],
    luck: NDArray[np.int32],
    exempt: NDArray[np.bool_] | None,
) -> NDArray[np.int32]:
    """Choose the rows' tokens.

    Args:
        logits: (rows, V).
        columns: the rows' parameters.
        picks: (rows, 1) uniforms in [0, 2**31) for the token.
        luck: (rows,) uniforms in [0, 2**31) for XTC.
        exempt: (V,), tokens XTC never drops.

    Returns:
        (rows,) ids, all in [0, V).
    """
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        best = logits.max(axis=-1, keepdims=True)
        excess = logits - best  # <= 0
        sound = bool(np.isfinite(best).all())
        weights = np.exp(excess) if sound else np.fmax(np.exp(excess), _NOTHING)  # fmax turns NaN into nothing
        keep = _filtered(weights, columns, luck, exempt)
        if columns.xtc_probability is not None and keep is not None:
            # The best token may be gone: what is left is weighed against the best that remains.
            excess = excess - np.where(keep, excess, -np.inf).max(axis=-1, keepdims=True)
            np.minimum(excess, _NOTHING, out=excess)
        excess *= columns.coldness
        drawn = np.exp(excess, out=excess)
        if not sound:
            np.fmax(drawn, _NOTHING, out=drawn)
        if keep is not None:
            drawn *= keep
        return _first_beyond(drawn, picks / float(_NEVER)).astype(np.int32)


def _filtered(
    weights: NDArray[np.float32],
    columns: HostColumns,
    luck: NDArray[np.int32],
    exempt: NDArray[np.bool_] | None,
) -> NDArray[np.bool_] | None:
    """Which tokens stay, (rows, V); None when all do. In mlx-lm's order: top-p, min-p, XTC, top-k."""
    keep: NDArray[np.bool_] | None = None
    if columns.top_p is not None:
        cut = np.flatnonzero(columns.top_p < 1)
        rising = np.sort(weights[cut], axis=-1)
        least = np.zeros((len(weights), 1), np.float32)
        least[cut] = np.take_along_axis(rising, _first_beyond(rising, 1.0 - columns.top_p[cut])[:, None], axis=-1)
        keep = weights >= least
    if columns.floor is not None:
        keep = _both(keep, weights >= columns.floor)
    if columns.xtc_probability is not None and columns.xtc_threshold is not None:
        struck = luck[:, None] < columns.xtc_probability
        if struck.any():
            keep = _both(keep, _xtc(weights, keep, columns.xtc_threshold, exempt) | ~struck)
    if columns.top_k is not None:
        keep = _top_k(weights, keep, columns.top_k)
    return keep


def _first_beyond(weights: NDArray[np.float32], shares: NDArray[np.float64]) -> NDArray[np.intp]:
    """Where each row's running sum first exceeds its share of the row's sum: (rows,) places, never of a zero weight.

    Summed in blocks, and one block place by place: a running sum of all would take ten times as long.

    Args:
        weights: (rows, V), none negative.
        shares: (rows, 1), below 1.
    """
    rows, size = weights.shape
    width = math.isqrt(size - 1) + 1
    count = -(-size // width)
    padded = np.empty((rows, count * width))
    padded[:, :size] = weights
    padded[:, size:] = 0
    blocks = padded.reshape(rows, count, width)
    ends = np.cumsum(blocks @ np.ones(width), axis=-1)
    target = ends[:, -1:] * shares
    block = np.minimum((ends <= target).sum(axis=-1), count - 1)
    row = np.arange(rows)
    inside = blocks[row, block]
    before = np.where(block > 0, ends[row, block - 1], 0.0)
    place = (before[:, None] + np.cumsum(inside, axis=-1) <= target).sum(axis=-1)
    last = width - 1 - (inside[:, ::-1] > 0).argmax(axis=-1)  # rounding may take the block's own sum to be less
    return np.minimum(block * width + np.minimum(place, last), size - 1)


def _xtc(
    weights: NDArray[np.float32],
    keep: NDArray[np.bool_] | None,
    thresholds: NDArray[np.float64],
    exempt: NDArray[np.bool_] | None,
) -> NDArray[np.bool_]:
    """All but the tokens above the threshold that are neither the least likely such token nor exempt."""
    kept = weights if keep is None else np.where(keep, weights, 0)
    limit = kept.sum(axis=-1, keepdims=True, dtype=np.float64) * thresholds
    above = kept > limit
    least = np.where(above, kept, np.inf).min(axis=-1, keepdims=True)
    stays = kept <= least
    return stays if exempt is None else stays | exempt


def _top_k(weights: NDArray[np.float32], keep: NDArray[np.bool_] | None, top_k: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Exactly the k most likely of the kept, or all if they are fewer; of equals those with the lower ids."""
    values = weights if keep is None else np.where(keep, weights, -1)
    most = int(top_k.max())
    size = values.shape[-1]
    best = values if most >= size else np.partition(values, size - most, axis=-1)[:, size - most :]
    falling = np.sort(best, axis=-1)[:, ::-1]
    threshold = np.take_along_axis(falling, np.minimum(top_k, falling.shape[-1]) - 1, axis=-1)
    above, ties = values > threshold, values == threshold
    room = top_k - above.sum(axis=-1, keepdims=True)
    stays = above | (ties & (np.cumsum(ties, axis=-1) <= room))
    return _both(keep, stays)


def _both(keep: NDArray[np.bool_] | None, more: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return more if keep is None else keep & more
