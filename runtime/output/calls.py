"""One tool call while it is written, from behind its opening mark to its closing one.

A closing mark inside an argument does not close it, so each one is judged by what stands before it. What turns out
not to be a call is handed back as text. JSON calls are streamed: name first, then arguments as they come.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..text.dialect import JSON_TOOLS
from .parts import CallPart, Tools, checked_calls, is_object, new_call_id
from .scan import JsonScan, held_back

if TYPE_CHECKING:
    from ..text.dialect import Dialect

MAX_CALL_CHARACTERS = 1 << 20
# Formats whose parsers are regular expressions of mlx-lm: some take quadratic time.
MAX_PARSED_CHARACTERS = 128 << 10
MAX_CLOSING_MARKS = 64
# gemma4's recursive expression is cubic in these.
MAX_PARSED_OPENINGS = 16
_PAIRS = (
    ("<function=", "</function>"), ("<parameter=", "</parameter>"), ("<arg_value>", "</arg_value>"),
    ("<longcat_arg_value>", "</longcat_arg_value>"), ("<invoke", "</invoke>"), ("<parameter name=", "</parameter>"),
    ("<param ", "</param>"), ("<atem:invoke", "</atem:invoke>"), ("<atem:parameter", "</atem:parameter>"),
    ("<![CDATA[", "]]>"), ("<|open|>argument", "<|close|>argument"),
)  # fmt: skip
_QUOTES = ("<escape>", '<|"|>')
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.){1,256})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
# What may follow the opening mark; anything else makes the mark prose.
_OPENINGS = {
    JSON_TOOLS: re.compile(r"\s*[{\[]?"),
    "qwen3_coder": re.compile(r"\s*(?:<(?:f(?:u(?:n(?:c(?:t(?:i(?:o(?:n(?:=.*)?)?)?)?)?)?)?)?)?)?", re.DOTALL),
}


class CallReader:
    """Reads one pair of marks.

    Attributes:
        done: the call is over; `rest` is what came after it.
        failed: it was no call; its opening mark is text, and `rest` is to be read again.
        count: calls begun; one that failed was being streamed.

    Args:
        dialect: the model's.
        tools: the request's.
        first: number of the first call in here.
        eager: stream arguments before the call is known to be whole.
    """

    def __init__(self, dialect: Dialect, tools: Tools, first: int, *, eager: bool) -> None:
        self.done = False
        self.failed = False
        self.rest = ""
        self.count = 0
        self._dialect = dialect
        self._tools = tools
        self._first = first
        self._eager = eager and dialect.parser == JSON_TOOLS
        self._end = dialect.call_end or dialect.call_start
        self._body = ""
        self._searched = 0
        self._closings = 0
        self._scan = JsonScan()
        self._scanned = 0
        self._streamed: JsonStream | None = None
        self._raw: list[str] = []

    def feed(self, text: str) -> list[CallPart]:
        """Take more text. After `done` or `failed` no more may come."""
        if self._streamed is not None:
            return self._feed_streamed(text)
        self._body += text
        if not self._plausible():
            return self._fail()
        if self._eager and (header := _HEADER.match(self._body)) and header[1] in self._tools.names:
            self._streamed = JsonStream(self._first, header[1])
            self.count = 1
            self._raw = [self._body[: header.end()]]
            body, self._body = self._body[header.end() :], ""
            return [self._streamed.opening(), *self._feed_streamed(body)]
        return self._look_for_end()

    def finish(self) -> list[CallPart]:
        """The output is over: what is here is a call if it is whole."""
        if self._streamed is not None:
            if not self._streamed.done:
                return self._break()
            self.done = True
            return []
        may_be_whole = not self._dialect.call_end or self._dialect.parser == JSON_TOOLS
        calls = self._parsed(self._body) if may_be_whole else None
        return self._fail() if calls is None else self._succeed(calls, "")

    def _feed_streamed(self, text: str) -> list[CallPart]:
        assert self._streamed is not None
        self._raw.append(text)
        parts = self._streamed.feed(text)
        if not self._streamed.done:
            return parts
        if not self._streamed.whole:
            return parts + self._break()
        self._body += self._streamed.left
        self._streamed.left = ""
        place = self._body.find(self._end)
        if place >= 0:
            self.done, self.rest = True, self._body[place + len(self._end) :]
        elif (tail := self._body.lstrip(" \t\r\n}")) and not self._end.startswith(tail):
            self.done, self.rest = True, tail  # the closing mark is missing; the call is whole
        return parts

    def _break(self) -> list[CallPart]:
        """What was streamed is no call: all that was written comes out as text too."""
        self.failed, self.rest = True, "".join(self._raw)
        return []

    def _plausible(self) -> bool:
        if len(self._body) > MAX_CALL_CHARACTERS:
            return False
        opening = _OPENINGS.get(self._dialect.parser)
        if opening is None:
            return True
        start = self._body[:64]
        matched = opening.match(start)
        return matched is not None and (matched.end() == len(start) or bool(start[: matched.end()].strip()))

    def _look_for_end(self) -> list[CallPart]:
        while (place := self._body.find(self._end, self._searched)) >= 0:
            self._closings += 1
            if self._is_open(place):
                if self._closings > MAX_CLOSING_MARKS and not self._is_json():
                    return self._fail()
                self._searched = place + 1
                continue
            calls = self._parsed(self._body[:place])
            if calls is None:
                return self._fail()
            return self._succeed(calls, self._body[place + len(self._dialect.call_end) :])
        self._searched = max(self._searched, len(self._body) - held_back(self._body, (self._end,)))
        return []

    def _is_json(self) -> bool:
        return self._body.lstrip()[:1] in ("{", "[")

    def _is_open(self, place: int) -> bool:
        """Whether the closing mark at `place` stands inside an argument."""
        if self._is_json():
            self._scan.feed(self._body[self._scanned : place])
            self._scanned = place
            return self._scan.in_string and not self._scan.done
        body = self._body[:place]
        if any(body.count(quote) % 2 for quote in _QUOTES):
            return True
        if self._dialect.parser == "mistral" and "{" in body:
            scan = JsonScan()
            scan.feed(body[body.index("{") :])
            return not scan.done
        return any(body.count(opening) > body.count(closing) for opening, closing in _PAIRS)

    def _parsed(self, body: str) -> list[CallPart] | None:
        json_call = self._dialect.parser == JSON_TOOLS
        if self._dialect.parse_call is None or (not json_call and len(body) > MAX_PARSED_CHARACTERS):
            return None
        if self._dialect.parser == "gemma4" and body.count("call:") > MAX_PARSED_OPENINGS:
            return None
        if json_call and (header := _HEADER.match(body)) and header[1] in self._tools.names:
            return self._exact(header[1], body[header.end() :])
        try:
            found = self._dialect.parse_call(body, self._tools.definitions)
        except Exception:
            # mlx-lm's parsers raise AttributeError, KeyError, ValueError, RecursionError and more on malformed calls.
            return None
        calls = checked_calls(found, self._tools)
        if calls is None:
            return None
        return [CallPart(self._first + place, new_call_id(), *call) for place, call in enumerate(calls)]

    def _exact(self, name: str, body: str) -> list[CallPart] | None:
        """The arguments as they were written, so that streamed and whole calls are the same text."""
        scan = JsonScan()
        arguments = body[: scan.feed(body)]
        if not scan.done or not is_object(arguments):
            return None
        return [CallPart(self._first, new_call_id(), name, arguments)]

    def _succeed(self, calls: list[CallPart], rest: str) -> list[CallPart]:
        self.done = True
        self.count = len(calls)
        self.rest = rest
        return calls

    def _fail(self) -> list[CallPart]:
        self.failed = True
        self.rest = self._body
        return []


class JsonStream:
    """The arguments of one JSON call as they come.

    Attributes:
        done: the arguments' brackets are closed; `left` is what came after them.
        whole: they are JSON.
    """

    def __init__(self, call: int, name: str) -> None:
        self.done = False
        self.left = ""
        self._call = call
        self._name = name
        self._scan = JsonScan()
        self._said: list[str] = []

    @property
    def whole(self) -> bool:
        """See above."""
        return is_object("".join(self._said))

    def opening(self) -> CallPart:
        """The call's first part."""
        return CallPart(self._call, new_call_id(), self._name, "")

    def feed(self, text: str) -> list[CallPart]:
        """Take more text."""
        if self.done:
            self.left += text
            return []
        used = self._scan.feed(text)
        self.done, self.left = self._scan.done, text[used:]
        self._said.append(text[:used])
        return [CallPart(self._call, "", "", text[:used])] if used else []
