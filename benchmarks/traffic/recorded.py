"""Requests from a file, one JSON object a line: prompts to ask, and a trace's arrival times and lengths.

Fields of ours: `prompt` or `messages`, `max_tokens`, `at_s`, `prompt_tokens`. A trace in Mooncake's form works as it
is: `timestamp` (milliseconds), `input_length`, `output_length`, `hash_ids` (one a block of 512 prompt tokens; equal ids
are equal text, so prefixes are shared as they were).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

HASH_BLOCK_TOKENS = 512


class RecordedRequest(msgspec.Struct, frozen=True):
    """One line.

    Attributes:
        at_s: arrival, seconds from the trace's start; None where the file has none.
        messages: what to ask; empty when only a length is known.
        prompt_tokens: length of a made-up prompt, when there are no messages.
        max_tokens: of the answer; None leaves it to the load's own lengths.
        blocks: ids of the prompt's blocks, when prefixes are to be shared as recorded.
    """

    at_s: float | None = None
    messages: tuple[dict[str, Any], ...] = ()
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    blocks: tuple[int, ...] = ()


class _Line(msgspec.Struct):
    """What a line may hold; unknown fields are ignored."""

    at_s: float | None = None
    timestamp: float | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_tokens: int | None = None
    input_length: int | None = None
    max_tokens: int | None = None
    output_length: int | None = None
    hash_ids: list[int] = []


def read_requests(path: Path) -> list[RecordedRequest]:
    """All lines of the file, in order of arrival. Raises OSError, or ValueError naming the line."""
    found = []
    decoder = msgspec.json.Decoder(_Line)
    for number, raw in enumerate(path.read_bytes().splitlines(), start=1):
        if not raw.strip():
            continue
        try:
            found.append(_request(decoder.decode(raw)))
        except (msgspec.DecodeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{path} holds no request")
    if any(request.at_s is None for request in found):
        return found
    first_s = min(request.at_s or 0.0 for request in found)
    moved = [msgspec.structs.replace(request, at_s=(request.at_s or 0.0) - first_s) for request in found]
    return sorted(moved, key=lambda request: request.at_s or 0.0)


def _request(line: _Line) -> RecordedRequest:
    messages = tuple(line.messages or ())
    if line.prompt is not None:
        messages = ({"role": "user", "content": line.prompt},)
    tokens = line.prompt_tokens if line.prompt_tokens is not None else line.input_length
    if not messages and tokens is None:
        raise ValueError("needs prompt, messages, prompt_tokens or input_length")
    at_s = line.at_s if line.at_s is not None else None if line.timestamp is None else line.timestamp / 1e3
    max_tokens = line.max_tokens if line.max_tokens is not None else line.output_length
    return RecordedRequest(at_s, messages, tokens, max_tokens, tuple(line.hash_ids))
