"""`POST /tokenize` and `/detokenize`, in vLLM's words and llama.cpp's (`content`)."""

from __future__ import annotations

import msgspec

from .fields import Number


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text to take apart."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None


class TokenizeAnswer(msgspec.Struct):
    """Its token ids."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids to put together."""

    model: str | None = None
    tokens: list[Number] | None = None


class DetokenizeAnswer(msgspec.Struct):
    """Their text, special tokens left out, under both servers' names."""

    prompt: str
    content: str
