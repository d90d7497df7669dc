"""What became of one request, in seconds from the load's start."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from ..sse import StreamRecord

_HTTP_STATUS = re.compile(r"HTTP (\d{3})")
_CODE = re.compile(r"(?:refused|failed), (\w+)")
_KINDS = {
    "no connection": "no connection",
    "connection lost": "connection lost",
    "no end within": "timeout",
    "error event": "error event",
    "the stream ended without": "no finish reason",
    "no HTTP response": "no response",
}


def error_kind(text: str) -> str:
    """The kind of an error, so that equal faults count together: "HTTP 429", "timeout", a code of the runtime."""
    for pattern in (_HTTP_STATUS, _CODE):
        if match := pattern.match(text):
            return match[0] if pattern is _HTTP_STATUS else match[1]
    for beginning, kind in _KINDS.items():
        if text.startswith(beginning):
            return kind
    return "bad answer"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        conversation, turn: which it was.
        intended_s: when the user meant to send it. All latencies count from here.
        sent_s: when the client began to, so that connecting counts as the server's time.
        end_s: when nothing more could come.
        text_times_s: arrivals of text; equal times are one arrival.
        tokens: of the answer: the server's count, else pieces of text.
        counted_by_server: whether `tokens` is the server's.
        wanted_tokens: `max_tokens`.
        error: empty when it ended well, or left as it was told to.
        left: the client disconnected on purpose.
    """

    conversation: int
    turn: int
    intended_s: float
    sent_s: float
    end_s: float
    text_times_s: tuple[float, ...]
    tokens: int
    counted_by_server: bool
    wanted_tokens: int
    prompt_tokens: int
    cached_tokens: int
    finish_reason: str
    error: str
    left: bool

    @property
    def first_token_s(self) -> float | None:
        """From the intended time to the first text."""
        return self.text_times_s[0] - self.intended_s if self.text_times_s else None

    @property
    def send_lag_s(self) -> float:
        """How late the client was: high values mean that the client, not the server, is the limit."""
        return self.sent_s - self.intended_s

    @property
    def whole_s(self) -> float:
        """From the intended time to the end."""
        return self.end_s - self.intended_s

    @property
    def per_token_s(self) -> float | None:
        """Mean time of a token after the first; None for answers of one token, and without a count."""
        if not self.text_times_s or self.tokens < 2:
            return None
        return (self.text_times_s[-1] - self.text_times_s[0]) / (self.tokens - 1)

    @property
    def good(self) -> bool:
        """Ended by itself, without an error."""
        return not self.error and not self.left

    def gaps_s(self) -> list[float]:
        """Pauses between arrivals of text."""
        return [after - before for before, after in pairwise(sorted(set(self.text_times_s)))]


def outcome_of(
    record: StreamRecord,
    *,
    begin_s: float,
    intended_s: float,
    asked_s: float,
    conversation: int,
    turn: int,
    wanted_tokens: int,
    left: bool,
) -> Outcome:
    """The outcome of a record whose times, like `begin_s`, `intended_s` and `asked_s`, are on the loop's clock."""
    return Outcome(
        conversation=conversation,
        turn=turn,
        intended_s=_rounded(intended_s - begin_s),
        sent_s=_rounded(asked_s - begin_s),
        end_s=_rounded(record.end_s - begin_s),
        text_times_s=tuple(_rounded(time_s - begin_s) for time_s in record.text_times_s),
        tokens=record.tokens,
        counted_by_server=record.usage_tokens is not None,
        wanted_tokens=wanted_tokens,
        prompt_tokens=record.prompt_tokens or 0,
        cached_tokens=record.cached_tokens or 0,
        finish_reason=record.finish_reason or "",
        error=record.error or "",
        left=left,
    )


def _rounded(seconds: float) -> float:
    """Microseconds are enough, and half the file."""
    return round(seconds, 6)
