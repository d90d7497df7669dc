"""Decodes a recorded exchange: HTTP head, chunk framing, server-sent events, OpenAI chunks.

An event carries the time at which its last byte arrived. Only events with text count as tokens
seen; role-only, empty and usage events do not. Comments (keep-alive) and `[DONE]` are skipped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from .http_stream import Arrival

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .http_stream import Exchange


class Event(NamedTuple):
    """The data of one server-sent event and when it was complete."""

    time_s: float
    data: bytes


@dataclass(slots=True)
class StreamRecord:
    """What one request gave, times on the loop's clock."""

    sent_s: float
    end_s: float
    text_times_s: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int | None = None
    usage_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None

    @property
    def tokens(self) -> int:
        """Completion tokens: the server's usage if given, else the events that carried text."""
        return len(self.text_times_s) if self.usage_tokens is None else self.usage_tokens

    @property
    def first_token_s(self) -> float | None:
        """Seconds from sending the request to the first text."""
        return self.text_times_s[0] - self.sent_s if self.text_times_s else None

    def gaps_s(self) -> list[float]:
        """Pauses between arrivals of text; texts that arrive together are one arrival."""
        times = sorted(set(self.text_times_s))
        return [after - before for before, after in pairwise(times)]

    def longest_gap_s(self, begin_s: float, end_s: float) -> float:
        """The longest time without text in [begin_s, end_s]; a gap reaching in counts whole."""
        times = [*sorted(set(self.text_times_s)), self.end_s]
        gaps = (after - before for before, after in pairwise(times) if after > begin_s and before < end_s)
        return max(gaps, default=0.0)


class ChunkDecoder:
    """Removes the framing of `Transfer-Encoding: chunked`, whatever the packet borders."""

    def __init__(self) -> None:
        self._buffer = b""
        self._remaining = 0

    def feed(self, data: bytes) -> bytes:
        """Return the payload that `data` completes. Raises ValueError on broken framing."""
        self._buffer += data
        payload = []
        while self._buffer:
            if self._remaining == 0 and not self._read_size():
                break
            piece = self._buffer[: self._remaining]
            payload.append(piece)
            self._buffer = self._buffer[len(piece) :]
            self._remaining -= len(piece)
        return b"".join(payload)

    def _read_size(self) -> bool:
        """Read the next size line (the CRLF that ends a chunk is an empty line before it)."""
        while b"\r\n" in self._buffer:
            line, self._buffer = self._buffer.split(b"\r\n", 1)
            if line:
                self._remaining = int(line.split(b";", 1)[0], 16)
                return self._remaining > 0
        return False


def decode(exchange: Exchange) -> StreamRecord:
    """Everything the exchange brought, as one record; never raises for what a server sent."""
    record = StreamRecord(exchange.sent_s, exchange.end_s, error=exchange.failure)
    try:
        status, body = _split_head(exchange.arrivals)
        if status != 200:
            raise ValueError(f"HTTP {status}: {_joined(body)[:200]!r}")
        for event in _events(body):
            _apply(record, event)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        record.error = record.error or str(error)
    if record.error is None and record.finish_reason is None:
        record.error = "the stream ended without a finish reason"
    return record


def whole_answer(exchange: Exchange) -> tuple[int, bytes]:
    """Status and body of an answer that is not a stream. Raises ValueError when it is no HTTP answer."""
    status, body = _split_head(exchange.arrivals)
    return status, _joined(body)


def _split_head(arrivals: list[Arrival]) -> tuple[int, list[Arrival]]:
    """The status and the body's arrivals without HTTP framing."""
    head, pieces = b"", iter(arrivals)
    for arrival in pieces:
        head += arrival.data
        if b"\r\n\r\n" in head:
            break
    else:
        raise ValueError("no HTTP response")
    head, rest = head.split(b"\r\n\r\n", 1)
    body = [Arrival(arrival.time_s, rest), *pieces]
    if b"transfer-encoding: chunked" in head.lower():
        decoder = ChunkDecoder()
        body = [Arrival(piece.time_s, decoder.feed(piece.data)) for piece in body]
    return int(head.split(b" ", 2)[1]), body


def _joined(body: list[Arrival]) -> bytes:
    return b"".join(piece.data for piece in body)


def _events(body: list[Arrival]) -> Iterator[Event]:
    pending = b""
    data: list[bytes] = []
    for piece in body:
        *lines, pending = (pending + piece.data).split(b"\n")
        for raw in lines:
            line = raw.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].lstrip())
            elif not line and data:
                yield Event(piece.time_s, b"\n".join(data))
                data = []


def _apply(record: StreamRecord, event: Event) -> None:
    if event.data == b"[DONE]":
        return
    chunk: dict[str, Any] = json.loads(event.data)
    if chunk.get("error"):
        raise ValueError(f"error event: {str(chunk['error'])[:200]}")
    if usage := chunk.get("usage"):
        record.prompt_tokens = usage.get("prompt_tokens")
        record.usage_tokens = usage.get("completion_tokens")
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    for choice in chunk.get("choices") or ():
        if text := _text(choice):
            record.text_times_s.append(event.time_s)
            record.text += text
        record.finish_reason = choice.get("finish_reason") or record.finish_reason


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    parts = (delta.get("content"), delta.get("reasoning_content"), delta.get("reasoning"), choice.get("text"))
    return "".join(part for part in parts if part)
