"""From logits to the masses of the tokens kept, for rows of one need: pure, lazy functions.

The order of the steps is that of mlx_lm.sample_utils.make_sampler: top-p, min-p, XTC, top-k, each on the untempered
distribution that the one before left, then the temperature. With `excess` = best logit - logit >= 0:

- top-p keeps a token if the mass of all strictly more likely ones is below top_p * total (ties stay together);
- min-p keeps it if excess <= -log(min_p);
- XTC, when its draw says so, drops the tokens whose share of what is left exceeds the threshold, except the least
  likely of them and the special tokens;
- top-k keeps the k most likely, of equals those with the lower ids.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx

from .mass import ENDLESS, count, cut, decay, share_of, to_mass


class Columns(NamedTuple):
    """Parameters of the rows of one group, (rows, 1) each; None where no row of the group needs the step.

    Attributes:
        coldness: 1 / temperature, float32.
        top_p: None or `Share`, the mass to keep.
        ceiling: -log(min_p), float32, infinite for rows without min-p.
        top_k: int64; more than the vocabulary for rows that keep every token.
    """

    coldness: mx.array
    top_p: Share | None
    ceiling: mx.array | None
    top_k: mx.array | None


class Share(NamedTuple):
    """Shares of a total, (rows, 1) each: int64 fixed point for `share_of`, and an int64 amount on top."""

    fixed: mx.array
    extra: mx.array

    def of(self, total: mx.array) -> mx.array:
        """The share of (rows, 1) totals."""
        return share_of(total, self.fixed) + self.extra


class Xtc(NamedTuple):
    """XTC of one step.

    Attributes:
        thresholds: (rows, 1) int64 fixed point, 2**31 for rows that XTC leaves alone this time.
        exempt: (V,) bool, tokens that are never dropped; None for none.
    """

    thresholds: mx.array
    exempt: mx.array | None


def all_masses(logits: mx.array, columns: Columns, xtc: Xtc | None, sort_limit: int) -> mx.array:
    """What each token of the vocabulary weighs in the draw, exactly, however many tokens are kept.

    Args:
        logits: (B, V) float32.
        columns: the rows' parameters.
        xtc: None when XTC leaves every row alone.
        sort_limit: see `cut`.

    Returns:
        (B, V) int64 masses, 0 for the tokens that are not kept.
    """
    excess = logits.max(axis=-1, keepdims=True) - logits
    keep = None
    if columns.top_p is not None:
        weights = decay(excess)
        limit = columns.top_p.of(to_mass(weights).sum(axis=-1, keepdims=True))
        keep = weights >= cut(weights, to_mass, limit, sort_limit)
    if columns.ceiling is not None:
        keep = _within(keep, excess <= columns.ceiling)
    if xtc is not None:
        keep = _within(keep, _xtc_keeps(to_mass(decay(excess)), keep, xtc))
        # The best token may be gone; the masses must stay relative to the best that is left.
        excess = mx.maximum(excess - mx.where(keep, excess, math.inf).min(axis=-1, keepdims=True), 0.0)
    if columns.top_k is not None:
        keep = _top_k_keeps(excess, keep, columns.top_k, sort_limit)
    return _tempered(excess, keep, columns.coldness)


def ranked_masses(logits: mx.array, columns: Columns, width: int) -> tuple[mx.array, mx.array]:
    """The same among the `width` best tokens: exact for rows whose top-k is at most that and that have no XTC.

    Only the mass that top-p refers to is taken over the whole vocabulary.

    Returns:
        (B, width) token ids, falling by logit, and their (B, width) int64 masses.
    """
    ids = _best(logits, width)
    values = mx.take_along_axis(logits, ids, axis=-1)
    best = values[:, :1]
    excess = best - values
    keep = None
    if columns.top_p is not None:
        masses = to_mass(decay(excess))
        limit = columns.top_p.of(to_mass(decay(best - logits)).sum(axis=-1, keepdims=True))
        stays = mx.cumsum(masses, axis=-1) - masses < limit
        keep = excess <= mx.where(stays, excess, -math.inf).max(axis=-1, keepdims=True)
    if columns.ceiling is not None:
        keep = _within(keep, excess <= columns.ceiling)
    if columns.top_k is not None:
        keep = _within(keep, mx.arange(ids.shape[-1]) < columns.top_k)
    return ids, _tempered(excess, keep, columns.coldness)


def _best(logits: mx.array, width: int) -> mx.array:
    """Ids of the `width` largest logits of each row, falling; (B, min(width, V))."""
    size = logits.shape[-1]
    if width >= size:
        return mx.argsort(-logits, axis=-1)
    ids = mx.argpartition(logits, size - width, axis=-1)[:, size - width :]
    order = mx.argsort(-mx.take_along_axis(logits, ids, axis=-1), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1)


def _within(keep: mx.array | None, more: mx.array) -> mx.array:
    return more if keep is None else keep & more


def _xtc_keeps(masses: mx.array, keep: mx.array | None, xtc: Xtc) -> mx.array:
    """All but the tokens above the threshold that are neither the least likely such token nor exempt; (B, V) bool."""
    if keep is not None:
        masses = mx.where(keep, masses, 0)
    limit = share_of(masses.sum(axis=-1, keepdims=True), xtc.thresholds)
    least = mx.where(masses > limit, masses, ENDLESS).min(axis=-1, keepdims=True)
    return masses <= least if xtc.exempt is None else (masses <= least) | xtc.exempt


def _top_k_keeps(excess: mx.array, keep: mx.array | None, top_k: mx.array, sort_limit: int) -> mx.array:
    """Exactly the k most likely of the kept, or all if they are fewer; (B, V) bool."""
    values = -excess if keep is None else mx.where(keep, -excess, -math.inf)
    threshold = cut(values, count, top_k, sort_limit)
    above, ties = values > threshold, values == threshold
    room = top_k - above.sum(axis=-1, keepdims=True)
    return _within(keep, above | (ties & (mx.cumsum(ties.astype(mx.int32), axis=-1) <= room)))


def _tempered(excess: mx.array, keep: mx.array | None, coldness: mx.array) -> mx.array:
    """Masses of the kept tokens under the temperature."""
    masses = to_mass(decay(excess * coldness))
    return masses if keep is None else mx.where(keep, masses, 0)
