"""Events of the runtime into Anthropic's event stream.

Invariants:
- `message_start` first; then blocks, each started, filled and stopped before the next, numbered from 0; then one
  `message_delta` with the reason and the counts; then `message_stop`;
- nothing follows an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ..runtime.events import Event, Failed, Finished, PrefillProgress, ReasoningDelta, TextDelta, ToolCallDelta
from .anthropic import stop_of, usage_of
from .errors import ended_early, from_failed
from .event_encoder import EventEncoder
from .sse import EARLY_ENDS, json_text
from .wire.messages import MessageAnswer, MessageUsage

if TYPE_CHECKING:
    from .errors import ApiError
    from .logprobs import TokenText
    from .sse import StreamHead

_encode = msgspec.json.Encoder().encode

_TEXT = b'{"type":"text","text":""}'
_THINKING = b'{"type":"thinking","thinking":"","signature":""}'


class MessagesEncoder(EventEncoder):
    """Encodes one stream. See `encoding.StreamEncoder`."""

    def __init__(self, head: StreamHead, _: TokenText) -> None:
        super().__init__(head.id)
        self._head = head
        self._open_block = ""
        self._block = -1

    def opening(self) -> bytes:
        """See StreamEncoder."""
        message = MessageAnswer(
            id=self._head.id,
            model=self._head.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=MessageUsage(input_tokens=self.prompt_tokens, output_tokens=0),
        )
        return _event("message_start", b'"message":' + _encode(message))

    def keepalive(self) -> bytes:
        """See StreamEncoder."""
        return _event("ping", b"")

    def _error_event(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error.anthropic_body() + b"\n\n"

    def _one(self, event: Event, pieces: list[bytes]) -> None:
        match event:
            case PrefillProgress():
                self.stage = "prefill"
            case TextDelta(text=""):
                self.stage = "decode"
            case TextDelta():
                self._enter("text", _TEXT, pieces)
                self._delta(b'{"type":"text_delta","text":' + json_text(event.text) + b"}", pieces)
            case ReasoningDelta() if self._head.reasoning_fields:
                self._enter("thinking", _THINKING, pieces)
                self._delta(b'{"type":"thinking_delta","thinking":' + json_text(event.text) + b"}", pieces)
            case ReasoningDelta():
                pass
            case ToolCallDelta():
                self._call(event, pieces)
            case Finished(reason=reason) if reason in EARLY_ENDS:
                pieces.append(self.fail(ended_early(reason)))
            case Finished():
                self._finish(event, pieces)
            case Failed():
                pieces.append(self.fail(from_failed(event, self._head.id)))

    def _call(self, event: ToolCallDelta, pieces: list[bytes]) -> None:
        start: dict[str, Any] = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
        self._enter(f"call {event.call}", _encode(start), pieces)
        if event.arguments:
            partial = b'{"type":"input_json_delta","partial_json":' + json_text(event.arguments) + b"}"
            self._delta(partial, pieces)

    def _enter(self, block: str, start: bytes, pieces: list[bytes]) -> None:
        """Be inside a block of this kind: stop the one before, start this."""
        self.stage = "decode"
        if block == self._open_block:
            return
        self._leave(pieces)
        self._block += 1
        self._open_block = block
        pieces.append(_event("content_block_start", b'"index":%d,"content_block":%b' % (self._block, start)))

    def _leave(self, pieces: list[bytes]) -> None:
        if self._open_block:
            pieces.append(_event("content_block_stop", b'"index":%d' % self._block))
            self._open_block = ""

    def _delta(self, delta: bytes, pieces: list[bytes]) -> None:
        pieces.append(_event("content_block_delta", b'"index":%d,"delta":%b' % (self._block, delta)))

    def _finish(self, event: Finished, pieces: list[bytes]) -> None:
        self._leave(pieces)
        reason, sequence = stop_of(event.reason, event.stop)
        delta = _encode({"stop_reason": reason, "stop_sequence": sequence})
        pieces.append(_event("message_delta", b'"delta":%b,"usage":%b' % (delta, _encode(usage_of(event.usage)))))
        pieces.append(_event("message_stop", b""))
        self._done = True


def _event(name: str, fields: bytes) -> bytes:
    kind = name.encode()
    comma = b"," if fields else b""
    return b'event: %b\ndata: {"type":"%b"%b%b}\n\n' % (kind, kind, comma, fields)
