"""Conversations to prompts, with the model's own chat template.

Templates are run by transformers, in its sandbox. What reaches them is shaped so that ordinary templates
work: text parts are joined, the arguments of tool calls are objects instead of JSON in a string, and when a
template cannot take an absent content (an assistant turn that only called tools) it gets an empty one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from ..errors import InvalidRequest
from .tokenizer_types import replaces

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .tokenizer_types import Message, Wrapper

# Names the template call itself uses: a client must not reach them through template arguments.
RESERVED_ARGUMENTS = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length",
        "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
        "sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a conversation becomes a prompt.

    Attributes:
        add_generation_prompt: end with the header of an assistant's turn; not with `continue_final_message`.
        continue_final_message: leave the last message open, for the model to go on with it.
        tools: JSON schemas of the tools the model may call.
        template_args: more variables for the template.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, object]] | None = None
    template_args: Mapping[str, object] = {}

    def check(self) -> None:
        """Raise InvalidRequest when `template_args` holds a name that is not a template's to use."""
        for name in self.template_args:
            if name in RESERVED_ARGUMENTS:
                raise InvalidRequest(f"{name!r} cannot be a template argument", param="chat_template_kwargs")

    def as_arguments(self) -> dict[str, object]:
        """Keyword arguments of `apply_chat_template`."""
        arguments: dict[str, object] = {
            **self.template_args,
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
        }
        if self.tools:
            arguments["tools"] = [dict(tool) for tool in self.tools]
        return arguments


def render(wrapper: Wrapper, messages: Iterable[Message], options: ChatOptions) -> str | list[int]:
    """The prompt's text; its ids where a tokenizer has a renderer of its own, whose text may not encode back.

    Raises:
        InvalidRequest: the model has no template, or it refuses these messages.
    """
    if not wrapper.has_chat_template:
        raise InvalidRequest("this model has no chat template: send a plain prompt instead", param="messages")
    shaped = [_shaped(message) for message in messages]
    try:
        return _apply(wrapper, shaped, options)
    except Exception as error:
        if all(message.get("content") is not None for message in shaped):
            raise _refusal(error) from error
    return _apply_filled(wrapper, shaped, options)


def count_chars(messages: Iterable[Message]) -> int:
    """Characters of all contents, roughly: enough to tell a long job from a short one."""
    total = 0
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        total += sum(len(text) for part in parts if isinstance(text := _text_of(part), str))
    return total


def _apply(wrapper: Wrapper, messages: list[dict[str, object]], options: ChatOptions) -> str | list[int]:
    own_renderer = replaces(getattr(wrapper, "_tokenizer", wrapper), "apply_chat_template")
    return wrapper.apply_chat_template(messages, tokenize=own_renderer, **options.as_arguments())


def _apply_filled(wrapper: Wrapper, messages: list[dict[str, object]], options: ChatOptions) -> str | list[int]:
    filled = [{**message, "content": message.get("content") or ""} for message in messages]
    try:
        return _apply(wrapper, filled, options)
    except Exception as error:
        raise _refusal(error) from error


def _refusal(error: Exception) -> InvalidRequest:
    # Whatever a template raises (raise_exception, a missing field, a wrong type) follows from the messages.
    return InvalidRequest(f"the model's chat template refused the messages: {error}", param="messages")


def _shaped(message: Message) -> dict[str, object]:
    shaped = dict(message)
    if "content" in message:
        shaped["content"] = _joined(message["content"])
    if isinstance(calls := message.get("tool_calls"), list):
        shaped["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return shaped


def _joined(content: object) -> object:
    """The text of a list of text parts; anything else as it is."""
    if not isinstance(content, list):
        return content
    texts = [text for part in content if isinstance(text := _text_of(part), str)]
    return "".join(texts) if len(texts) == len(content) else content


def _text_of(part: object) -> object:
    if isinstance(part, dict) and part.get("type", "text") == "text":
        return part.get("text")
    return part


def _with_parsed_arguments(call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": parsed}}
