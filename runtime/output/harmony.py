"""Harmony, the format of gpt-oss: every message has a channel. mlx-lm has no parser for it.

<|channel|>analysis<|message|>a thought<|end|><|start|>assistant<|channel|>final<|message|>the answer<|return|>
<|channel|>commentary to=functions.name <|constrain|>json<|message|>{"argument": 1}<|call|>
"""

from __future__ import annotations

import re

from ..text.dialect import HARMONY_MARKERS
from .parts import CallPart, Part, TextPart, ThoughtPart, Tools, is_object, new_call_id
from .scan import first_mark, held_back

MAX_HEADER_CHARACTERS = 1024
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonySplitter:
    """See `splitter.Splitter`. A call whose message was cut, or is no JSON object, comes out as text.

    Args:
        tools: what may be called.
        opened: text of an open message that the prompt ends with is an answer: a continued one.
        eager: stream the arguments of calls.
    """

    def __init__(self, tools: Tools | None, *, opened: bool, eager: bool) -> None:
        self.in_thought = False
        self.calls = self.broken = 0
        self._tools = tools
        self._eager = eager
        self._held = ""
        self._header: str | None = None if opened else ""
        self._name: str | None = None
        self._pieces: list[str] = []
        self._begun = False

    def feed(self, text: str) -> list[Part]:
        """See Splitter."""
        parts: list[Part] = []
        text, self._held = self._held + text, ""
        while text:
            text = self._in_body(text, parts) if self._header is None else self._in_header(text)
        return parts

    def finish(self) -> list[Part]:
        """See Splitter."""
        parts: list[Part] = []
        held, self._held = self._held, ""
        if self._header is None:
            self._say(held, parts)
            self._close(parts)
        elif not _CHANNEL.search(self._header + held):
            self._plain(self._header + held, parts)
        self._header = ""
        return parts

    def _in_header(self, text: str) -> str:
        assert self._header is not None
        self._header += text
        place = self._header.find(_MESSAGE)
        if not _may_be_header(self._header) or max(place, len(self._header) * (place < 0)) > MAX_HEADER_CHARACTERS:
            text, self._header, self._name = self._header, None, None
            return text  # an answer that no header announces
        if place >= 0:
            header, rest = self._header[:place], self._header[place + len(_MESSAGE) :]
            self._header = None
            self._open(header)
            return rest
        return ""

    def _open(self, header: str) -> None:
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        name = recipient[1] if recipient else None
        offered = self._tools is not None and name in self._tools.names
        self._name, self._pieces, self._begun = (name if offered else None), [], False
        self.in_thought = channel is not None and channel[1] == "analysis" and self._name is None

    def _in_body(self, text: str, parts: list[Part]) -> str:
        place, mark = first_mark(text, HARMONY_MARKERS)
        if place < 0:
            kept = len(text) - held_back(text, HARMONY_MARKERS)
            self._held = text[kept:]
            self._say(text[:kept], parts)
            return ""
        self._say(text[:place], parts)
        if mark in _ENDS:
            self._close(parts)
            self._header = mark if mark in ("<|start|>", "<|channel|>") else ""
        return text[place + len(mark) :]

    def _say(self, text: str, parts: list[Part]) -> None:
        if not text:
            return
        if self._name is None:
            parts.append(ThoughtPart(text) if self.in_thought else TextPart(text))
        else:
            self._pieces.append(text)
            if self._begun:
                parts.append(CallPart(self.calls - 1, "", "", text))
            elif self._eager and (body := "".join(self._pieces)).lstrip().startswith("{"):
                self._begin(self._name, body, parts)

    def _begin(self, name: str, text: str, parts: list[Part]) -> None:
        """Stream the arguments from here on."""
        parts.append(CallPart(self.calls, new_call_id(), name, ""))
        self.calls += 1
        self._begun = True
        parts.append(CallPart(self.calls - 1, "", "", text))

    def _close(self, parts: list[Part]) -> None:
        """The message is over."""
        name, self._name = self._name, None
        self.in_thought = False
        if name is None:
            return
        body = "".join(self._pieces)
        self._pieces = []
        arguments = body if body.strip() else "{}"
        if not is_object(arguments):
            self.broken += self._begun
            parts.append(TextPart(body.strip()))
        elif not self._begun:
            parts.append(CallPart(self.calls, new_call_id(), name, arguments))
            self.calls += 1

    def _plain(self, text: str, parts: list[Part]) -> None:
        for mark in HARMONY_MARKERS:
            text = text.replace(mark, "")
        if text:
            parts.append(TextPart(text))


def _may_be_header(text: str) -> bool:
    """Whether a header can still come of this: it begins with a mark, or with a role after one."""
    text = text.lstrip()
    return any(_begins(text, mark) for mark in ("<|start|>", "<|channel|>", _MESSAGE))


def _begins(text: str, mark: str) -> bool:
    return text.startswith(mark) or mark.startswith(text)
