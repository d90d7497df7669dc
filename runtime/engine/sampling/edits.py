"""What changes logits before a token is chosen, but for penalties: the grammar's mask, biases, suppressed tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .rows import Row

FINITE_LIMIT = 1e30
"""Where biases and the logits under a mask are clipped: far beyond any logit, and safe to compute with."""
MASK_BITS = 32


def apply_mask(logits: mx.array, allowed: mx.array) -> mx.array:
    """Forbid tokens. Done after all other edits, which leave a forbidden token forbidden, to have the last word.

    Args:
        logits: (B, V) float32.
        allowed: (B, >= ceil(V / 32)) int32 or uint32; token t is bit t % 32 of word t // 32.

    Returns:
        (B, V): -inf where forbidden, finite where allowed, also for infinite logits and NaN, so that an allowed token
        wins even in a row of broken or suppressed logits.
    """
    bits = (allowed.view(mx.uint32)[:, :, None] >> mx.arange(MASK_BITS, dtype=mx.uint32)) & 1
    chosen = bits.astype(mx.bool_).reshape(allowed.shape[0], -1)[:, : logits.shape[-1]]
    finite = mx.where(logits > -FINITE_LIMIT, mx.minimum(logits, FINITE_LIMIT), -FINITE_LIMIT)
    return mx.where(chosen, finite, -mx.inf)


class Biases(NamedTuple):
    """Amounts added to single logits, of all rows together: places (n,) int32, amounts (n,) float32."""

    places: mx.array
    amounts: mx.array

    def apply(self, flat: mx.array) -> mx.array:
        """Add; amounts for the same token add up."""
        return flat.at[self.places].add(self.amounts)


def build_biases(rows: Sequence[Row], slots: Sequence[int], vocab_size: int) -> Biases | None:
    """Collect the rows' logit biases and the tokens suppressed now; None when there are none."""
    places: list[int] = []
    amounts: list[float] = []
    for row, slot in zip(rows, slots, strict=True):
        start = slot * vocab_size
        for token, amount in row.params.logit_bias:
            places.append(start + token)
            amounts.append(min(max(amount, -FINITE_LIMIT), FINITE_LIMIT))
        suppressed = {*row.params.suppressed, *(row.held_back if row.holding_back else ())}
        places.extend(start + token for token in suppressed)
        amounts.extend([-math.inf] * len(suppressed))
    if not places:
        return None
    return Biases(mx.array(np.array(places, dtype=np.int32)), mx.array(np.array(amounts, dtype=np.float32)))
