"""A whole answer out of a request's events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from .errors import ActorDied, Overloaded, RequestCancelled, RequestTimedOut, TroupeError
from .events import (
    Embedded,
    Failed,
    Finished,
    PrefillProgress,
    PromptLogprobs,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from .generation import Choice, Completion, ToolCall

if TYPE_CHECKING:
    from .events import Usage
    from .service import EventSource


class ChoiceParts:
    """One choice while its events come in."""

    def __init__(self) -> None:
        self.deltas: list[TextDelta] = []
        self.thoughts: list[str] = []
        self.calls: dict[int, list[ToolCallDelta]] = {}
        self.end: Finished | None = None
        self.prompt: PromptLogprobs | None = None
        self.embedding = b""

    def add(self, event: PromptLogprobs | Embedded | TextDelta | ReasoningDelta | ToolCallDelta | Finished) -> None:
        """Take in the next event."""
        match event:
            case Finished():
                self.end = event
            case ReasoningDelta(text=text):
                self.thoughts.append(text)
            case ToolCallDelta():
                self.calls.setdefault(event.call, []).append(event)
            case TextDelta():
                self.deltas.append(event)
            case PromptLogprobs():
                self.prompt = event
            case Embedded(vector=vector):
                self.embedding = vector

    def choice(self) -> Choice:
        """The whole choice. Raises a TroupeError where the request ended early and has nothing to show."""
        end = self.end
        if end is None:
            raise ActorDied("the request ended without a final event")
        if end.reason == "cancelled":
            raise RequestCancelled("the request was cancelled")
        if end.reason == "timeout" and not self.deltas:
            raise RequestTimedOut("the request's time was over before its first token; raise timeout_s")
        asked = self.prompt is not None or any(delta.logprobs is not None for delta in self.deltas)
        return Choice(
            text="".join(delta.text for delta in self.deltas),
            tokens=tuple(token for delta in self.deltas for token in delta.tokens),
            finish_reason=end.reason,
            logprobs=tuple(entry for delta in self.deltas for entry in delta.logprobs or ()) if asked else None,
            stop=end.stop,
            usage=end.usage,
            reasoning="".join(self.thoughts),
            tool_calls=tuple(
                ToolCall(parts[0].id, parts[0].name, "".join(part.arguments for part in parts))
                for parts in self.calls.values()
            ),
            prompt=self.prompt,
            embedding=self.embedding,
        )


async def completion_of(source: EventSource, choices: int, model: str) -> Completion:
    """The whole answer, once every choice has ended. Raises the first choice's failure as a TroupeError."""
    parts = [ChoiceParts() for _ in range(choices)]
    async for event in source:
        if isinstance(event, Failed):
            raise error_of(event)
        if not isinstance(event, PrefillProgress):
            parts[event.index].add(event)
    whole = tuple(part.choice() for part in parts)
    return Completion(source.request_id, model, whole, total_usage(whole))


def error_of(event: Failed) -> TroupeError:
    """The error that the event stands for."""
    if event.retry_after_s is not None:
        return Overloaded(event.message, retry_after_s=event.retry_after_s, code=event.code)
    return TroupeError(event.message, param=event.param, code=event.code)


def total_usage(choices: tuple[Choice, ...]) -> Usage:
    """The request's usage: one prompt, all choices' output, the longest times."""
    usages = [choice.usage for choice in choices]
    return msgspec.structs.replace(
        usages[0],
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        decode_s=max(usage.decode_s for usage in usages),
    )
