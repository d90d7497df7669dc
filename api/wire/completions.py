"""`POST /v1/completions`: the request, and the whole answer."""

from __future__ import annotations

from typing import Any

import msgspec

from .fields import Number, Prompts, RequestFields
from .usage import CompletionUsage


class CompletionRequest(RequestFields, kw_only=True):
    """The body of a completion request. `prompt` is a text, token ids, or a list of either.

    `echo` puts the prompt in front of the output, with its log-probabilities if any are asked; `max_tokens` may be 0
    then.
    """

    prompt: Prompts | None = None
    logprobs: Number | bool | None = None
    best_of: Number | None = None
    echo: bool | None = None
    tools: Any = None
    tool_choice: Any = None


class LegacyLogprobs(msgspec.Struct):
    """Log-probabilities of a completion choice: one entry a token in every list, null for a prompt's first token.

    Attributes:
        text_offset: where each token's text starts in the choice's text, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
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
