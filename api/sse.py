"""Events of the runtime into bytes of a server-sent event stream, in OpenAI's shapes.

At 64 streams a step this runs 64 times a step, so all of a chunk but its text is built once: a token costs one JSON
escape and a join of three byte strings. Encoders know nothing of sockets; `streaming` moves their bytes. Another
protocol (Anthropic's, OpenAI's responses) is another encoder.

Invariants:
- the role comes first, once a choice; then text; then one chunk with the finish reason; then usage, if asked; then
  `[DONE]`, once, and only after every choice has finished as it should;
- id, created, model and fingerprint are the same in every chunk;
- nothing follows an error.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import msgspec

from ..runtime.events import (
    Event,
    Failed,
    Finished,
    PrefillProgress,
    PromptLogprobs,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from .errors import ApiError, ended_early, from_failed, internal
from .logprobs import chat_logprobs, echoed_logprobs, legacy_logprobs
from .wire.usage import CompletionUsage, usage_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..runtime.events import PositionLogprobs
    from .logprobs import TokenText

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
EARLY_ENDS = ("cancelled", "timeout")

_encode = msgspec.json.Encoder().encode


class StreamHead(msgspec.Struct, frozen=True, kw_only=True):
    """What all chunks of one stream have in common.

    Attributes:
        id: the answer's id.
        created: Unix seconds.
        model: name of the served model.
        fingerprint: of model and server.
        choices: how many choices the stream carries, over all prompts.
        prompts: how many prompts; choices of one prompt follow each other.
        include_usage: counts come in a last chunk, and every other chunk says `"usage": null`.
        return_progress: prefill progress comes in chunks without choices.
        reasoning_fields: names under which the thought is sent; () leaves it out.
        echo: the prompts' texts, where choices begin with them; () leaves them out.
        echo_logprobs: they come with their log-probabilities.
    """

    id: str
    created: int
    model: str
    fingerprint: str
    choices: int = 1
    prompts: int = 1
    include_usage: bool = False
    return_progress: bool = False
    reasoning_fields: tuple[str, ...] = ("reasoning_content",)
    echo: tuple[str, ...] = ()
    echo_logprobs: bool = False

    def echo_of(self, choice: int) -> str:
        """The text that a choice begins with."""
        return self.echo[choice * self.prompts // self.choices] if self.echo else ""


def json_text(text: str) -> bytes:
    """A JSON string that no line-based reader cuts: beyond ASCII, U+0085, U+2028 and U+2029 end lines for some."""
    data = _encode(text)
    if text.isascii():
        return data
    if b"\xc2\x85" in data or b"\xe2\x80" in data:
        data = data.replace(b"\xc2\x85", b"\\u0085")
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return data


class ChunkEncoder(ABC):
    """Encodes one stream's events; one per response.

    Attributes:
        error: set when the stream has ended with an error; its event is the last thing encoded.
        progress: the latest prefill progress, for keep-alive comments.
        stage: "queued", "prefill" or "decode".
        prompt_tokens: of the request, when it has one prompt.
    """

    object_name: str

    def __init__(self, head: StreamHead, token_text: TokenText) -> None:
        self.head = head
        self.error: ApiError | None = None
        self.progress: PrefillProgress | None = None
        self.stage = "queued"
        self.prompt_tokens = 0
        self._token_text = token_text
        self._open = head.choices
        self._usages: list[Usage | None] = [None] * head.choices
        fields = {
            "id": head.id,
            "object": self.object_name,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        self._prefix = b"data: " + _encode(fields)[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if head.include_usage else b"]}\n\n"
        self._text_prefixes = [self._prefix + self._text_opening(index) for index in range(head.choices)]
        self._text_suffix = self._text_closing() + self._suffix

    @property
    def finished(self) -> bool:
        """Every choice has ended, or the stream has failed."""
        return self._open <= 0 or self.error is not None

    @property
    def failed(self) -> bool:
        """The stream has ended with an error."""
        return self.error is not None

    def encode(self, events: Iterable[Event]) -> bytes:
        """Bytes of a batch of events, the stream's end included when they bring it; b"" if none is visible."""
        pieces: list[bytes] = []
        for event in events:
            if type(event) is TextDelta:
                self.stage = "decode"
                if event.logprobs:
                    pieces.append(self._text_with_logprobs(event, event.logprobs))
                elif event.text:
                    pieces += (self._text_prefixes[event.index], json_text(event.text), self._text_suffix)
            else:
                self._encode_other(event, pieces)
                if self.error is not None:
                    break
        if self._open <= 0 and self.error is None:
            pieces.append(self.closing())
        return b"".join(pieces)

    def _encode_other(self, event: Event, pieces: list[bytes]) -> None:
        match event:
            case PrefillProgress():
                self.progress = event
                self.stage = "prefill"
                if self.head.return_progress:
                    pieces.append(self._progress_chunk(event))
            case PromptLogprobs():
                pieces.append(self._prompt_logprobs(event))
            case ReasoningDelta():
                self.stage = "decode"
                pieces.append(self._reasoning(event))
            case ToolCallDelta():
                self.stage = "decode"
                pieces.append(self._tool_call(event))
            case Finished(reason=reason) if reason in EARLY_ENDS:
                pieces.append(self.fail(ended_early(reason)))
            case Finished():
                self._open -= 1
                self._usages[event.index] = event.usage
                pieces.append(self._prefix + self._finish(event) + self._suffix)
            case Failed():
                pieces.append(self.fail(from_failed(event, self.head.id)))

    def fail(self, error: ApiError) -> bytes:
        """End the stream: bytes of its error event."""
        self.error = error
        return b"data: " + error.body() + b"\n\n"

    def broken_off(self) -> bytes:
        """End the stream because the runtime has nothing more to say, though choices are open."""
        logger.error("request %s: events ended with %d choices open", self.head.id, self._open)
        return self.fail(internal(self.head.id))

    def opening(self) -> bytes:
        """What comes before any text."""
        return b""

    def closing(self) -> bytes:
        """What comes after the last choice: usage, if asked, and the end mark."""
        if not self.head.include_usage:
            return DONE
        usage = _encode(usage_total([usage or Usage() for usage in self._usages], self.head.prompts))
        return self._prefix + b'],"usage":' + usage + b"}\n\n" + DONE

    def keepalive(self) -> bytes:
        """A comment, which clients skip, that says how far the prefill is."""
        progress = self.progress
        if progress is None:
            return b": keepalive\n\n"
        return b": keepalive %d/%d\n\n" % (progress.done_tokens, progress.total_tokens)

    def _progress_chunk(self, event: PrefillProgress) -> bytes:
        # The field is llama.cpp's.
        progress = {"total": event.total_tokens, "processed": event.done_tokens}
        ending = self._suffix[:-3] + b',"prompt_progress":' + _encode(progress) + b"}\n\n"
        return self._prefix + ending

    def _prompt_logprobs(self, event: PromptLogprobs) -> bytes:
        return b""

    def _reasoning(self, event: ReasoningDelta) -> bytes:
        return b""

    def _tool_call(self, event: ToolCallDelta) -> bytes:
        return b""

    @abstractmethod
    def _text_opening(self, index: int) -> bytes: ...

    @abstractmethod
    def _text_closing(self) -> bytes: ...

    @abstractmethod
    def _text_with_logprobs(self, event: TextDelta, logprobs: tuple[PositionLogprobs, ...]) -> bytes: ...

    @abstractmethod
    def _finish(self, event: Finished) -> bytes: ...


class ChatChunkEncoder(ChunkEncoder):
    """`chat.completion.chunk`."""

    object_name = "chat.completion.chunk"

    def opening(self) -> bytes:
        role = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return b"".join(self._prefix + role % index + self._suffix for index in range(self.head.choices))

    def _reasoning(self, event: ReasoningDelta) -> bytes:
        names = self.head.reasoning_fields
        if not names:
            return b""
        text = json_text(event.text)
        return self._delta(event.index, b",".join(b'"%b":%b' % (name.encode(), text) for name in names))

    def _tool_call(self, event: ToolCallDelta) -> bytes:
        opening = b'"id":%b,"type":"function",' % json_text(event.id) if event.id else b""
        name = b'"name":%b,' % json_text(event.name) if event.id else b""
        function = b'"function":{%b"arguments":%b}' % (name, json_text(event.arguments))
        return self._delta(event.index, b'"tool_calls":[{"index":%d,%b%b}]' % (event.call, opening, function))

    def _delta(self, index: int, content: bytes) -> bytes:
        ending = b'{"index":%d,"delta":{%b},"logprobs":null,"finish_reason":null}'
        return self._prefix + ending % (index, content) + self._suffix

    def _text_opening(self, index: int) -> bytes:
        return b'{"index":%d,"delta":{"content":' % index

    def _text_closing(self) -> bytes:
        return b'},"logprobs":null,"finish_reason":null}'

    def _text_with_logprobs(self, event: TextDelta, logprobs: tuple[PositionLogprobs, ...]) -> bytes:
        entry = _encode(chat_logprobs(logprobs, self._token_text))
        opening = self._text_prefixes[event.index] + json_text(event.text)
        return opening + b'},"logprobs":' + entry + b',"finish_reason":null}' + self._suffix

    def _finish(self, event: Finished) -> bytes:
        ending = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b"}'
        return ending % (event.index, event.reason.encode())


class CompletionChunkEncoder(ChunkEncoder):
    """`text_completion`, one a delta."""

    object_name = "text_completion"

    def __init__(self, head: StreamHead, token_text: TokenText) -> None:
        super().__init__(head, token_text)
        self._offsets = [len(head.echo_of(index)) for index in range(head.choices)]

    def opening(self) -> bytes:
        """The prompts, unless their log-probabilities come with them later."""
        if self.head.echo_logprobs:
            return b""
        return b"".join(self._echo(index, b"null") for index in range(self.head.choices) if self.head.echo)

    def _prompt_logprobs(self, event: PromptLogprobs) -> bytes:
        found = echoed_logprobs(event, self.head.echo_of(event.index), self._token_text)
        return self._echo(event.index, _encode(found))

    def _echo(self, index: int, logprobs: bytes) -> bytes:
        opening = self._text_prefixes[index] + json_text(self.head.echo_of(index))
        return opening + b',"logprobs":' + logprobs + b',"finish_reason":null}' + self._suffix

    def _text_opening(self, index: int) -> bytes:
        return b'{"index":%d,"text":' % index

    def _text_closing(self) -> bytes:
        return b',"logprobs":null,"finish_reason":null}'

    def _text_with_logprobs(self, event: TextDelta, logprobs: tuple[PositionLogprobs, ...]) -> bytes:
        found = legacy_logprobs(logprobs, self._token_text, self._offsets[event.index])
        self._offsets[event.index] += sum(map(len, found.tokens))
        opening = self._text_prefixes[event.index] + json_text(event.text)
        return opening + b',"logprobs":' + _encode(found) + b',"finish_reason":null}' + self._suffix

    def _finish(self, event: Finished) -> bytes:
        ending = b'{"index":%d,"text":"","logprobs":null,"finish_reason":"%b"}'
        return ending % (event.index, event.reason.encode())


def usage_total(usages: Sequence[Usage], prompts: int) -> CompletionUsage:
    """Counts over all choices; choices of one prompt follow each other and share its tokens."""
    per_prompt = max(1, len(usages) // max(1, prompts))
    firsts = usages[::per_prompt]
    return usage_of(
        sum(usage.prompt_tokens for usage in firsts),
        sum(usage.cached_tokens for usage in firsts),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.reasoning_tokens for usage in usages),
    )
