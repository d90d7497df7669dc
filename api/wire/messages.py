"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`: requests and whole answers.

`cache_control` may stand anywhere; like all unknown fields it is accepted: prefixes are cached without it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .fields import Number


class Block(msgspec.Struct, kw_only=True):
    """A block of a message or of the system prompt; its `type` says which fields count."""

    type: str | None = None
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    thinking: str | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    """One turn."""

    role: str | None = None
    content: str | list[Block] | None = None


class InputTool(msgspec.Struct, kw_only=True):
    """A tool; only the client's own ones (`type` null or "custom") can be served."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """Which tools may or must be used."""

    type: str | None = None
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether to think, and at most how long."""

    type: str | None = None
    budget_tokens: Number | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """What the answer must match."""

    type: str | None = None
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """`output_config`."""

    format: OutputFormat | None = None
    effort: str | None = None


class MessagesRequest(msgspec.Struct, kw_only=True):
    """The body of a request."""

    model: str | None = None
    messages: list[InputMessage] | None = None
    system: str | list[Block] | None = None
    max_tokens: Number | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Number | None = None
    tools: list[InputTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    # Known and not served.
    container: Any = None
    mcp_servers: Any = None


class TextBlock(msgspec.Struct, kw_only=True):
    """Text of an answer."""

    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True):
    """A thought; signatures are Anthropic's own, and clients send back what they got."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True):
    """A tool call."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: msgspec.Raw


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts; `input_tokens` are those that the cache did not have."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int


class MessageAnswer(msgspec.Struct, kw_only=True):
    """The whole answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Any]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    """The answer of `count_tokens`."""

    input_tokens: int
