"""Turns as chat templates take them. Many refuse a system message that is not the first, or two turns of one side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def alternating(messages: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """One system message, at the start, and no two turns of the user's in a row.

    Agents send several of both. Anthropic's API joins turns of one side too; what the system says in mid-conversation
    becomes part of the user's turn.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"]
        if role == "system" and any(earlier["role"] != "system" for earlier in found):
            role = "user"
        if found and role == found[-1]["role"] and role in ("system", "user"):
            texts = (found[-1]["content"], message["content"])
            found[-1]["content"] = "\n\n".join(text for text in texts if text)
        else:
            found.append({**message, "role": role})
    return tuple(found)
