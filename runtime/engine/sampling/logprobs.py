"""Log-probabilities for the rows that ask: of the logits after mask, bias and penalties, untempered and unfiltered."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .mass import decay


class RowLogprobs(NamedTuple):
    """Log-probabilities of the n rows that asked; the arrays are lazy.

    Attributes:
        slots: the rows' places in the batch.
        top_counts: how many of the best each row asked for, 0 for the chosen token alone.
        chosen: (n,) float32, of the token sampled.
        top_ids: (n, most asked) int32, falling by probability; None when nobody asked for the best.
        top_logprobs: (n, most asked) float32; None likewise.
    """

    slots: tuple[int, ...]
    top_counts: tuple[int, ...]
    chosen: mx.array
    top_ids: mx.array | None
    top_logprobs: mx.array | None


def row_logprobs(
    logits: mx.array, tokens: mx.array, slots: tuple[int, ...], top_counts: tuple[int, ...], block_rows: int
) -> RowLogprobs:
    """Compute them.

    Args:
        logits: (n, V) float32, of the rows that asked alone.
        tokens: (n,) int32, the tokens they sampled.
        slots: see `RowLogprobs`.
        top_counts: likewise.
        block_rows: rows to work on at once.
    """
    blocks = [_log_total(logits[i : i + block_rows]) for i in range(0, len(slots), block_rows)]
    norm = blocks[0] if len(blocks) == 1 else mx.concatenate(blocks)
    chosen = (mx.take_along_axis(logits, tokens[:, None], axis=-1) - norm)[:, 0]
    size = logits.shape[-1]
    most = min(max(top_counts), size)
    if most == 0:
        return RowLogprobs(slots, top_counts, chosen, None, None)
    ids = mx.argpartition(logits, size - most, axis=-1)[:, size - most :]
    values = mx.take_along_axis(logits, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)
    top_ids = mx.take_along_axis(ids, order, axis=-1).astype(mx.int32)
    return RowLogprobs(slots, top_counts, chosen, top_ids, mx.take_along_axis(values, order, axis=-1) - norm)


def _log_total(logits: mx.array) -> mx.array:
    """logsumexp over each row, by the faster exponential; (rows, 1)."""
    best = logits.max(axis=-1, keepdims=True)
    return best + mx.log(decay(best - logits).sum(axis=-1, keepdims=True))
