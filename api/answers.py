"""Whole answers: from the runtime's Completions to OpenAI's bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import ended_early
from .logprobs import chat_logprobs, echoed_logprobs, legacy_logprobs
from .sse import EARLY_ENDS, StreamHead, usage_total
from .wire.chat import AnswerFunction, AnswerMessage, AnswerToolCall, ChatChoice, ChatCompletion
from .wire.completions import TextChoice, TextCompletion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..runtime.generation import Choice, Completion
    from .logprobs import TokenText
    from .wire.completions import LegacyLogprobs


def chat_answer(head: StreamHead, completions: Sequence[Completion], token_text: TokenText) -> ChatCompletion:
    """The body of a chat answer. Raises ApiError if a choice was cancelled or timed out."""
    choices = _all_choices(completions)
    return ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.fingerprint,
        choices=[
            ChatChoice(
                index,
                answer_message(choice, head.reasoning_fields),
                None if choice.logprobs is None else chat_logprobs(choice.logprobs, token_text),
                choice.finish_reason,
            )
            for index, choice in enumerate(choices)
        ],
        usage=usage_total([choice.usage for choice in choices], head.prompts),
    )


def answer_message(choice: Choice, reasoning_fields: Sequence[str]) -> AnswerMessage:
    """The assistant's message: content is null when there are only tool calls."""
    message = AnswerMessage(choice.text or (None if choice.tool_calls else ""), "assistant", None)
    if choice.tool_calls:
        message.tool_calls = [
            AnswerToolCall(call.id, AnswerFunction(call.name, call.arguments)) for call in choice.tool_calls
        ]
    if choice.reasoning:
        for name in reasoning_fields:
            setattr(message, name, choice.reasoning)
    return message


def completion_answer(head: StreamHead, completions: Sequence[Completion], token_text: TokenText) -> TextCompletion:
    """The body of a completion answer. Raises ApiError if a choice was cancelled or timed out."""
    choices = _all_choices(completions)
    return TextCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.fingerprint,
        choices=[
            TextChoice(
                index,
                head.echo_of(index) + choice.text,
                _legacy_logprobs(choice, head.echo_of(index), token_text),
                choice.finish_reason,
            )
            for index, choice in enumerate(choices)
        ],
        usage=usage_total([choice.usage for choice in choices], head.prompts),
    )


def _legacy_logprobs(choice: Choice, text: str, token_text: TokenText) -> LegacyLogprobs | None:
    if choice.logprobs is None:
        return None
    prompt = None if choice.prompt is None else echoed_logprobs(choice.prompt, text, token_text)
    return legacy_logprobs(choice.logprobs, token_text, len(text), after=prompt)


def _all_choices(completions: Sequence[Completion]) -> list[Choice]:
    choices = [choice for completion in completions for choice in completion.choices]
    for choice in choices:
        if choice.finish_reason in EARLY_ENDS:
            raise ended_early(choice.finish_reason)
    return choices
