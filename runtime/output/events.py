"""A request's events with its rows' text taken apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..events import Event, Failed, Finished, ReasoningDelta, TextDelta, ToolCallDelta
from .parts import CallPart, TextPart, ThoughtPart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .parts import Part
    from .splitter import Splitter


class EventSplitter:
    """Splits the events of one request. Used on the event loop.

    Tokens and log-probabilities stay in TextDeltas, whichever part their text went to.

    Args:
        splitters: one a choice.
    """

    def __init__(self, splitters: Sequence[Splitter]) -> None:
        self._splitters = splitters
        self._thought_tokens = [0] * len(splitters)

    def split(self, events: Sequence[Event]) -> list[Event]:
        """The same events, text deltas replaced by their parts."""
        found: list[Event] = []
        for event in events:
            match event:
                case TextDelta():
                    self._split_text(event, found)
                case Finished():
                    self._finish(event, found)
                case Failed(index=index):
                    self._splitters[index].finish()
                    found.append(event)
                case _:
                    found.append(event)
        return found

    def _split_text(self, event: TextDelta, found: list[Event]) -> None:
        splitter = self._splitters[event.index]
        in_thought = splitter.in_thought
        parts = splitter.feed(event.text) if event.text else []
        if in_thought and splitter.in_thought:
            self._thought_tokens[event.index] += len(event.tokens)
        elif in_thought or splitter.in_thought or any(isinstance(part, ThoughtPart) for part in parts):
            self._thought_tokens[event.index] += 1
        if len(parts) == 1 and isinstance(parts[0], TextPart):
            found.append(msgspec.structs.replace(event, text=parts[0].text))
            return
        found += (_event(part, event.index) for part in parts)
        found.append(msgspec.structs.replace(event, text=""))

    def _finish(self, event: Finished, found: list[Event]) -> None:
        splitter = self._splitters[event.index]
        found += (_event(part, event.index) for part in splitter.finish())
        called = splitter.calls > splitter.broken and event.reason == "stop"
        usage = msgspec.structs.replace(event.usage, reasoning_tokens=self._thought_tokens[event.index])
        found.append(msgspec.structs.replace(event, reason="tool_calls" if called else event.reason, usage=usage))


def _event(part: Part, index: int) -> Event:
    match part:
        case CallPart():
            return ToolCallDelta(part.call, part.id, part.name, part.arguments, index)
        case ThoughtPart():
            return ReasoningDelta(part.text, index)
        case TextPart():
            return TextDelta(part.text, (), None, index)
