"""`POST /v1/chat/completions`: the request, and the whole answer."""

from __future__ import annotations

from typing import Any

import msgspec

from .fields import Number, RequestFields
from .usage import CompletionUsage


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message; only `text` parts can be served."""

    type: str | None = None
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """One chat message."""

    role: str | None = None
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    # Known and not served yet; null and empty lists are what clients echo back.
    audio: Any = None
    function_call: Any = None
    tool_call_id: Any = None
    tool_calls: Any = None


class ChatRequest(RequestFields, kw_only=True):
    """The body of a chat request."""

    messages: list[Message] | None = None
    max_completion_tokens: Number | None = None
    logprobs: bool | None = None
    top_logprobs: Number | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenAlternative(msgspec.Struct):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(msgspec.Struct):
    """The chosen token at a position, and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenAlternative]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat choice."""

    content: list[TokenEntry]
    refusal: None = None


class AnswerMessage(msgspec.Struct):
    """The assistant's message."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One choice of a whole answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The whole answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: CompletionUsage
