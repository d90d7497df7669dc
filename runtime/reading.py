"""What is read off a prompt's forward besides its KV: log-probabilities of its tokens, or one vector of it."""

from __future__ import annotations

from typing import Literal

import msgspec

from .events import PositionLogprobs

Pooling = Literal["mean", "last"]


class PromptReading(msgspec.Struct, frozen=True):
    """What a request wants of its prompt. Exactly one of the two is given.

    Attributes:
        top_logprobs: log-probabilities of every prompt token but the first, and so many of the likeliest.
        pooling: how the model's last hidden states become one vector: their mean, or that of the last token.
    """

    top_logprobs: int | None = None
    pooling: Pooling | None = None


class ChunkReading(msgspec.Struct, frozen=True):
    """What one chunk gave.

    Attributes:
        logprobs: one entry a token of the chunk, of the token that follows it.
        vector: hidden states pooled so far, this chunk's included: their sum, or the last one. Native float32.
    """

    logprobs: tuple[PositionLogprobs, ...] = ()
    vector: bytes = b""
