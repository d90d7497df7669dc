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


class MessageFunction(msgspec.Struct, kw_only=True):
    """The function of a call that is fed back; `arguments` is JSON text."""

    name: str | None = None
    arguments: str | None = None


class MessageToolCall(msgspec.Struct, kw_only=True):
    """A tool call of an earlier answer."""

    id: str | None = None
    type: str | None = None
    function: MessageFunction | None = None


class Message(msgspec.Struct, kw_only=True):
    """One chat message."""

    role: str | None = None
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    # Known and not served; null and empty lists are what clients echo back.
    audio: Any = None
    function_call: Any = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """`reasoning` of a request, OpenRouter's: `max_tokens` bounds the thought, `exclude` keeps it out of the answer."""

    effort: str | None = None
    max_tokens: Number | None = None
    exclude: bool | None = None
    enabled: bool | None = None


class ChatRequest(RequestFields, kw_only=True):
    """The body of a chat request.

    `include_reasoning` true gives the thought as `reasoning` besides `reasoning_content`, false leaves both out.
    """

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning: ReasoningOptions | None = None
    thinking_budget: Number | None = None
    enable_thinking: bool | None = None

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


class AnswerFunction(msgspec.Struct):
    """What is called; `arguments` is JSON text."""

    name: str
    arguments: str


class AnswerToolCall(msgspec.Struct):
    """A tool call."""

    id: str
    function: AnswerFunction
    type: str = "function"


class AnswerMessage(msgspec.Struct, omit_defaults=True):
    """The assistant's message; `content` is null when there are only tool calls."""

    content: str | None
    role: str | msgspec.UnsetType = msgspec.UNSET
    refusal: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[AnswerToolCall] | msgspec.UnsetType = msgspec.UNSET


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
