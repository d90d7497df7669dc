"""Calls that a grammar has forced: the whole answer is JSON, `[{"name": ..., "arguments": {...}}]`, or the arguments
of one named function. Works for every model, whatever its own format of calls is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .parts import CallPart, Part, TextPart, Tools, checked_calls, is_object, new_call_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .splitter import Splitter

MAX_FORCED_CALLS = 16


def forced_schema(tools: Sequence[Mapping[str, Any]], name: str | None, *, parallel: bool) -> dict[str, Any]:
    """JSON schema of the answer: of the arguments of `name`, or of a list of calls."""
    functions = [tool.get("function", {}) for tool in tools]
    if name is not None:
        return _parameters(next(function for function in functions if function.get("name") == name))
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function.get("name")}, "arguments": _parameters(function)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    most = MAX_FORCED_CALLS if parallel else 1
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "maxItems": most}


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, always of an object."""
    given = function.get("parameters")
    return {**given, "type": "object"} if isinstance(given, dict) and given else {"type": "object"}


class ForcedSplitter:
    """Turns the answer that an inner splitter finds into calls. An answer that was cut comes out as text.

    Args:
        inner: takes thoughts off.
        tools: the request's.
        name: the one function; None for a list of calls.
        eager: stream the arguments of a named function.
    """

    def __init__(self, inner: Splitter, tools: Tools, name: str | None, *, eager: bool) -> None:
        self.calls = self.broken = 0
        self._inner = inner
        self._tools = tools
        self._name = name
        self._eager = eager and name is not None
        self._pieces: list[str] = []

    @property
    def in_thought(self) -> bool:
        """See Splitter."""
        return self._inner.in_thought

    def feed(self, text: str) -> list[Part]:
        """See Splitter."""
        return self._taken(self._inner.feed(text))

    def finish(self) -> list[Part]:
        """See Splitter."""
        parts = self._taken(self._inner.finish())
        text = "".join(self._pieces)
        self._pieces = []
        if not text:
            return parts
        if self._eager:
            if is_object(text):
                return parts
            self.broken = 1
            return [*parts, TextPart(text)]
        calls = self._calls(text)
        self.calls = len(calls)
        return [*parts, *(calls or [TextPart(text)])]

    def _taken(self, found: list[Part]) -> list[Part]:
        parts: list[Part] = []
        for part in found:
            if not isinstance(part, TextPart):
                parts.append(part)
            elif self._eager:
                if not self.calls:
                    self.calls = 1
                    parts.append(CallPart(0, new_call_id(), self._name or "", ""))
                parts.append(CallPart(0, "", "", part.text))
                self._pieces.append(part.text)
            else:
                self._pieces.append(part.text)
        return parts

    def _calls(self, text: str) -> list[Part]:
        if self._name is not None:
            return [CallPart(0, new_call_id(), self._name, text)] if is_object(text) else []
        try:
            found = checked_calls(json.loads(text), self._tools)
        except (ValueError, RecursionError):
            return []
        return [CallPart(place, new_call_id(), *call) for place, call in enumerate(found or ())]
