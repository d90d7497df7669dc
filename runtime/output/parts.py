"""The parts of an output, and the one check that every tool call passes."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class TextPart(msgspec.Struct, frozen=True):
    """Some of the answer."""

    text: str


class ThoughtPart(msgspec.Struct, frozen=True):
    """Some of the thought."""

    text: str


class CallPart(msgspec.Struct, frozen=True):
    """Some of a tool call: its id and name come once, in its first part.

    Attributes:
        call: which of the output's calls.
        arguments: JSON text, or a piece of it.
    """

    call: int
    id: str
    name: str
    arguments: str


Part = TextPart | ThoughtPart | CallPart


class Tools:
    """The tools that a request offers.

    Args:
        definitions: OpenAI's `{"type": "function", "function": {...}}`.
    """

    def __init__(self, definitions: Sequence[Mapping[str, Any]]) -> None:
        self.definitions = [dict(definition) for definition in definitions]
        self.names = frozenset(str(definition.get("function", {}).get("name", "")) for definition in self.definitions)


def checked_calls(found: object, tools: Tools) -> list[tuple[str, str]] | None:
    """Names and arguments (JSON text) of what a parser found; None unless all of it are calls of offered tools."""
    entries = found if isinstance(found, list) else [found]
    calls = [_checked(entry, tools) for entry in entries]
    good = [call for call in calls if call is not None]
    return good if good and len(good) == len(calls) else None


def new_call_id() -> str:
    """An id that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _checked(entry: object, tools: Tools) -> tuple[str, str] | None:
    if not isinstance(entry, dict):
        return None
    name, arguments = entry.get("name"), entry.get("arguments", entry.get("parameters", {}))
    if not isinstance(name, str) or name not in tools.names:
        return None
    if isinstance(arguments, str):
        arguments = _loaded(arguments)
    if not isinstance(arguments, dict):
        return None
    try:
        return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None


def _loaded(text: str) -> object:
    try:
        return json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return None


def is_object(text: str) -> bool:
    """Whether a text is one JSON object, as clients will read it."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
