"""`POST /v1/completions`: the request, and the whole answer."""

from __future__ import annotations

from typing import Any

import msgspec

from .fields import Number, RequestFields
from .usage import CompletionUsage


class CompletionRequest(RequestFields, kw_only=True):
    """The body of a completion request. `prompt` is a text, token ids, or a list of either."""

    prompt: str | list[str | int | float | list[int | float]] | None = None
    logprobs: Number | bool | None = None
    best_of: Number | None = None
    tools: Any = None
    tool_choice: Any = None


class LegacyLogprobs(msgspec.Struct):
    """Log-probabilities of a completion choice: one entry a token in every list.

    Attributes:
        text_offset: where each token's text starts in the choice's text, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(msgspec.Struct):
    """One choice of a whole answer."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: str


class TextCompletion(msgspec.Struct, kw_only=True):
    """The whole answer."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: CompletionUsage
