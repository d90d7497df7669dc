"""Events of the runtime into the event stream of OpenAI's responses, and into the response object itself.

Invariants: numbers rise by one; an item is added, filled and done before the next; `response.completed`, `incomplete`
or an error is the last event.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from ..runtime.events import Event, Failed, Finished, PrefillProgress, ReasoningDelta, TextDelta, ToolCallDelta
from .errors import ended_early, from_failed
from .event_encoder import EventEncoder
from .responses import close_response
from .sse import EARLY_ENDS, json_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from .errors import ApiError
    from .wire.responses import Response


def _line_safe(value: object) -> bytes:
    """JSON without the characters beyond ASCII that end lines for some readers."""
    data = msgspec.json.encode(value)
    if b"\xc2\x85" in data or b"\xe2\x80" in data:
        data = data.replace(b"\xc2\x85", b"\\u0085")
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return data


class ResponsesEncoder(EventEncoder):
    """Encodes one stream. See `encoding.StreamEncoder`.

    Args:
        response: filled in as the output comes.
        on_end: hears of the response when it has ended as it should.
    """

    def __init__(self, response: Response, on_end: Callable[[Response], None]) -> None:
        super().__init__(response.id)
        self._response = response
        self._on_end = on_end
        self._number = 0
        self._kind = ""
        self._pieces: list[str] = []
        self._opening = self._whole("response.created") + self._whole("response.in_progress")

    def opening(self) -> bytes:
        """See StreamEncoder; made before any event, so its numbers come first and its response is empty."""
        return self._opening

    def keepalive(self) -> bytes:
        """See StreamEncoder."""
        return b": keepalive\n\n"

    def _error_event(self, error: ApiError) -> bytes:
        return self._event("error", {"code": error.code, "message": error.message, "param": error.param})

    def _one(self, event: Event, out: list[bytes]) -> None:
        match event:
            case PrefillProgress():
                self.stage = "prefill"
            case TextDelta(text=""):
                self.stage = "decode"
            case TextDelta(text=text):
                self._enter("message", {"role": "assistant", "content": []}, out)
                self._delta("response.output_text.delta", text, out)
            case ReasoningDelta(text=text):
                self._enter("reasoning", {"summary": [], "content": []}, out)
                self._delta("response.reasoning_text.delta", text, out)
            case ToolCallDelta():
                start = {"call_id": event.id, "name": event.name, "arguments": ""}
                self._enter(f"function_call {event.call}", start, out)
                self._delta("response.function_call_arguments.delta", event.arguments, out)
            case Finished(reason=reason) if reason in EARLY_ENDS:
                out.append(self.fail(ended_early(reason)))
            case Finished():
                self._finish(event, out)
            case Failed():
                out.append(self.fail(from_failed(event, self._response.id)))

    def _enter(self, kind: str, start: dict[str, Any], out: list[bytes]) -> None:
        """Be inside an item of this kind: finish the one before, add this."""
        self.stage = "decode"
        if kind == self._kind:
            return
        self._leave(out, "completed")
        self._kind = kind
        name = kind.partition(" ")[0]
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[name]
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": name, "status": "in_progress", **start}
        self._response.output.append(item)
        out.append(self._event("response.output_item.added", {"output_index": self._index, "item": item}))
        if name == "message":
            out.append(self._part("response.content_part.added", ""))

    def _leave(self, out: list[bytes], status: str) -> None:
        if not self._kind:
            return
        item, text = self._response.output[-1], "".join(self._pieces)
        match item["type"]:
            case "message":
                item["content"] = [_output_text(text)]
                out.append(self._place("response.output_text.done", {"text": text, "logprobs": []}))
                out.append(self._part("response.content_part.done", text))
            case "reasoning":
                item["content"] = [{"type": "reasoning_text", "text": text}]
                out.append(self._place("response.reasoning_text.done", {"text": text}))
            case _:
                item["arguments"] = text
                fields = {"item_id": item["id"], "output_index": self._index, "arguments": text}
                out.append(self._event("response.function_call_arguments.done", fields))
        item["status"] = status
        out.append(self._event("response.output_item.done", {"output_index": self._index, "item": item}))
        self._kind, self._pieces = "", []

    def _delta(self, name: str, text: str, out: list[bytes]) -> None:
        if not text:
            return
        self._pieces.append(text)
        item = self._response.output[-1]["id"].encode()
        place = b"" if name == "response.function_call_arguments.delta" else b'"content_index":0,'
        logprobs = b',"logprobs":[]' if name == "response.output_text.delta" else b""
        fields = b'"item_id":"%b","output_index":%d,%b"delta":%b%b'
        out.append(self._raw(name, fields % (item, self._index, place, json_text(text), logprobs)))

    def _finish(self, event: Finished, out: list[bytes]) -> None:
        self._leave(out, "incomplete" if event.reason == "length" else "completed")
        close_response(self._response, event.reason, event.usage)
        out.append(self._whole(f"response.{self._response.status}"))
        self._done = True
        self._on_end(self._response)

    @property
    def _index(self) -> int:
        return len(self._response.output) - 1

    def _part(self, name: str, text: str) -> bytes:
        return self._place(name, {"part": _output_text(text)})

    def _place(self, name: str, fields: dict[str, Any]) -> bytes:
        item = self._response.output[-1]["id"]
        return self._event(name, {"item_id": item, "output_index": self._index, "content_index": 0, **fields})

    def _whole(self, name: str) -> bytes:
        return self._event(name, {"response": self._response})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        return self._raw(name, _line_safe(fields)[1:-1])

    def _raw(self, name: str, fields: bytes) -> bytes:
        kind, number = name.encode(), self._number
        self._number += 1
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b}\n\n' % (kind, kind, number, fields)


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
