"""OpenAI's `POST /v1/responses`: the request, and the response object."""

from __future__ import annotations

from typing import Any

import msgspec

from .fields import Number


class InputPart(msgspec.Struct, kw_only=True):
    """A part of an item's content."""

    type: str | None = None
    text: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """One item of the input: a message, a call or its output, or a thought that is fed back."""

    type: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """`text.format`."""

    type: str | None = None
    schema: Any = None


class TextOptions(msgspec.Struct, kw_only=True):
    """`text`."""

    format: TextFormat | None = None


class ThoughtOptions(msgspec.Struct, kw_only=True):
    """`reasoning`; `max_tokens`, the most tokens of a thought, is not OpenAI's."""

    effort: str | None = None
    max_tokens: Number | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """The body of a request."""

    model: str | None = None
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    max_output_tokens: Number | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ThoughtOptions | None = None
    metadata: dict[str, str] | None = None
    # Known and not served.
    background: Any = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    top_logprobs: Any = None
    truncation: Any = None
    moderation: Any = None


class InputDetails(msgspec.Struct):
    """Where input tokens came from."""

    cached_tokens: int


class OutputDetails(msgspec.Struct):
    """What output tokens were spent on."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    """The response object. `output` holds messages, thoughts and calls in the order they were written."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
