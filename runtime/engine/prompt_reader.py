"""Reads log-probabilities or a vector off a prompt's forward, chunk by chunk. Owned by the MLX thread.

The logits of a long prompt over a large vocabulary do not fit anywhere (16,384 x 151,936 float32 are 10 GB), so a chunk
that wants them runs in slices whose logits stay under LOGITS_BYTES. A vector needs none: the part of the model in front
of its head is run alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx.nn import Module

from ..events import PositionLogprobs, TokenLogprob
from ..reading import ChunkReading
from .kv.staged import StagedRow
from .kv.together import extend_together

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..messages.executor import Chunk
    from ..reading import PromptReading
    from .kv.shapes import LayerShape
    from .kv.together import Piece

LOGITS_BYTES = 64 << 20
"""Float32 logits of one slice; half as much again is there for a moment in the model's own type."""
_PARTS = ("language_model", "model", "transformer", "backbone", "gpt_neox", "text_model")


class PromptReader:
    """See the module.

    Args:
        model: mlx-lm's.
        vocab_size: scored ids.

    Attributes:
        slice_tokens: most tokens whose logits are computed at once.
        embeds: whether hidden states, and so vectors, can be had.
    """

    def __init__(self, model: Any, vocab_size: int) -> None:
        self.slice_tokens = max(1, LOGITS_BYTES // (4 * vocab_size))
        self._body = hidden_part(model, vocab_size)
        self.embeds = self._body is not None

    def append(self, staged: StagedRow, tokens: Sequence[int], chunk: Chunk) -> list[PositionLogprobs]:
        """Run tokens of the chunk and read what it asks for; the vector stays in `staged.pooled`."""
        reading = chunk.reading
        assert reading is not None
        if reading.pooling is None:
            return self._score(staged, tokens, chunk, reading.top_logprobs or 0)
        staged.pooled = _pooled(staged, staged.forward(tokens, self._body)[0], reading)
        mx.eval(staged.pooled, *staged.arrays())
        return []

    def append_together(self, shapes: list[LayerShape], pieces: Sequence[Piece], chunks: Sequence[Chunk]) -> None:
        """The same for several rows that become vectors, in one forward. When it raises they are as they were."""
        vectors: list[mx.array] = []

        def pool(hidden: mx.array) -> list[mx.array]:
            for place, (piece, chunk) in enumerate(zip(pieces, chunks, strict=True)):
                assert chunk.reading is not None
                vectors.append(_pooled(piece.row, hidden[place, : len(piece.tokens)], chunk.reading))
            return vectors

        extend_together(self._body, shapes, pieces, pool)
        for piece, vector in zip(pieces, vectors, strict=True):
            piece.row.pooled = vector

    def _score(self, staged: StagedRow, tokens: Sequence[int], chunk: Chunk, top: int) -> list[PositionLogprobs]:
        found: list[PositionLogprobs] = []
        after = staged.length - chunk.start + 1
        for low in range(0, len(tokens), self.slice_tokens):
            part = tokens[low : low + self.slice_tokens]
            targets = (*chunk.tokens, *chunk.following)[after + low : after + low + len(part)]
            logits = staged.forward(part)[0].astype(mx.float32)
            found += _logprobs(logits, targets, top, staged)
        return found


def _pooled(staged: StagedRow, hidden: mx.array, reading: PromptReading) -> mx.array:
    """What `staged.pooled` becomes with the (tokens, size) hidden states that come next; float32 (size,), lazy."""
    states = hidden.astype(mx.float32)
    if reading.pooling == "last":
        return states[-1]
    total = states.sum(axis=0)
    return total if staged.pooled is None else staged.pooled + total


def vector_of(staged: StagedRow) -> bytes:
    """The pooled vector so far, native float32; b"" when there is none."""
    return b"" if staged.pooled is None else np.array(staged.pooled, dtype=np.float32).tobytes()


def read_of(staged: StagedRow, chunk: Chunk, logprobs: list[PositionLogprobs]) -> ChunkReading | None:
    """What the chunk's reading is; None when it asked for nothing."""
    return None if chunk.reading is None else ChunkReading(tuple(logprobs), vector_of(staged))


def hidden_part(model: Any, vocab_size: int) -> Any:
    """The part of a model that gives its last hidden states, after their norm; None when there is none to be found.

    In mlx-lm's models that is the largest part that takes tokens and a cache, and whose output is not of the
    vocabulary's size.
    """
    for part in _parts(model):
        staged = StagedRow(model)
        try:
            output = staged.forward([0, 0], part)
            mx.eval(output)
        except (TypeError, ValueError, AttributeError, IndexError, KeyError):
            continue
        if isinstance(output, mx.array) and output.ndim == 3 and output.shape[-1] != vocab_size:
            return part
    return None


def _parts(model: Any) -> Iterator[Any]:
    for name in _PARTS:
        part = getattr(model, name, None)
        if isinstance(part, Module):
            yield part
            yield from _parts(part)


def _logprobs(logits: mx.array, targets: Sequence[int], top: int, staged: StagedRow) -> list[PositionLogprobs]:
    """Log-probabilities of the targets under (tokens, V) float32 logits, and of the `top` likeliest each."""
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    index = mx.array(list(targets), dtype=mx.int32)[:, None]
    chosen = (mx.take_along_axis(logits, index, axis=-1) - total)[:, 0]
    ids = values = mx.zeros((len(targets), 0))
    if top:
        size = logits.shape[-1]
        best = mx.argpartition(logits, size - top, axis=-1)[:, size - top :]
        order = mx.argsort(-mx.take_along_axis(logits, best, axis=-1), axis=-1)
        ids = mx.take_along_axis(best, order, axis=-1)
        values = mx.take_along_axis(logits, ids, axis=-1) - total
    mx.eval(chosen, ids, values, *staged.arrays())
    rows = zip(targets, _numbers(chosen), _numbers(ids), _numbers(values), strict=True)
    return [
        PositionLogprobs(
            TokenLogprob(int(token), logprob),
            tuple(TokenLogprob(int(other), value) for other, value in zip(best, bests, strict=True)),
        )
        for token, logprob, best, bests in rows
    ]


def _numbers(array: mx.array) -> list[Any]:
    numbers: list[Any] = array.tolist()  # type: ignore[assignment]  # never a scalar here
    return numbers
