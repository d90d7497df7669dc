"""Takes one row's text apart while it grows. Used on the event loop, one a stream.

Invariants (each has a test of its name):
- `nothing_is_lost`: all text comes out, in order, as thought, call or answer; only the marks and blanks by them go;
- `cutting_does_not_matter`: the parts, joined, do not depend on how the text was cut into deltas;
- `never_raises`: whatever the text holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from .calls import CallReader
from .parts import Part, TextPart, ThoughtPart
from .scan import first_mark, held_back

if TYPE_CHECKING:
    from ..text.dialect import Dialect
    from .parts import Tools


MAX_FAILED_CALLS = 16
MAX_FAILED_CHARACTERS = 256 << 10


class Splitter(Protocol):
    """Anything that takes text apart.

    Attributes:
        in_thought: the text so far ends inside a thought.
        calls: tool calls begun so far.
        broken: those of them whose streamed arguments proved to be none; their text came out as well.
    """

    calls: int
    broken: int

    @property
    def in_thought(self) -> bool:
        """See above."""
        ...

    def feed(self, text: str) -> list[Part]:
        """Take more text; return the parts that are certain."""
        ...

    def finish(self) -> list[Part]:
        """The text is over; return what was held back."""
        ...


class TaggedSplitter:
    """Thoughts and calls stand between marks.

    Args:
        dialect: the marks.
        tools: what may be called; None leaves calls as text.
        in_thought: the prompt has opened a thought.
        eager: stream the arguments of calls.
    """

    def __init__(self, dialect: Dialect, tools: Tools | None, *, in_thought: bool, eager: bool) -> None:
        self.in_thought = in_thought
        self.calls = self.broken = 0
        self._dialect = dialect
        self._tools = tools if dialect.call_start else None
        self._eager = eager
        self._failed_calls = self._failed_characters = 0
        self._held = ""
        self._blanks = self._lost_blanks = ""
        self._at_edge = in_thought
        self._call: CallReader | None = None
        marks = [dialect.think_start, dialect.think_end, dialect.call_start if self._tools is not None else ""]
        self._marks = tuple(mark for mark in marks if mark)
        self._firsts = tuple({mark[0] for mark in self._marks})

    def feed(self, text: str) -> list[Part]:
        """See Splitter."""
        if self._is_plain(text):
            return [ThoughtPart(text) if self.in_thought else TextPart(text)]
        parts: list[Part] = []
        while text:
            text = self._step(text, parts)
        return parts

    def finish(self) -> list[Part]:
        """See Splitter."""
        parts: list[Part] = []
        while self._call is not None:
            parts += self._call.finish()
            rest = self._leave_call(parts)
            if rest:
                parts += self.feed(rest)
        if self._held:
            held, self._held = self._held, ""
            self._say(held, parts)
        if not self.in_thought and self._blanks and not self._at_edge:
            parts.append(TextPart(self._blanks))
        self._blanks = ""
        return parts

    def _is_plain(self, text: str) -> bool:
        """Most tokens: nothing waits, and no mark can begin in them nor blanks before one."""
        if self._call is not None or self._held or self._blanks or self._at_edge or not text or text[-1].isspace():
            return False
        return not any(first in text for first in self._firsts)

    def _step(self, text: str, parts: list[Part]) -> str:
        """Deal with what comes next in `text`; return what is left of it."""
        if self._call is not None:
            parts += self._call.feed(text)
            return self._leave_call(parts) if self._call.done or self._call.failed else ""
        text, self._held = self._held + text, ""
        marks = (self._dialect.think_end,) if self.in_thought else self._marks
        place, mark = first_mark(text, marks)
        if place < 0:
            kept = len(text) - held_back(text, marks)
            text, self._held = text[:kept], text[kept:]
            self._say(text, parts)
            return ""
        self._say(text[:place], parts)
        self._pass(mark)
        return text[place + len(mark) :]

    def _pass(self, mark: str) -> None:
        """Go past a mark. Blanks on both of its sides belong to it."""
        self._lost_blanks, self._blanks, self._at_edge = self._blanks, "", True
        if mark == self._dialect.think_end:
            self.in_thought = False
        elif mark == self._dialect.think_start:
            self.in_thought = True
        elif self._tools is not None:
            self._call = CallReader(self._dialect, self._tools, self.calls, eager=self._eager)

    def _leave_call(self, parts: list[Part]) -> str:
        call, self._call = self._call, None
        assert call is not None
        self.calls += call.count
        if call.failed:
            self.broken += call.count
            self._failed_calls += 1
            self._failed_characters += len(call.rest)
            if self._failed_calls >= MAX_FAILED_CALLS or self._failed_characters >= MAX_FAILED_CHARACTERS:
                self._marks = tuple(mark for mark in self._marks if mark != self._dialect.call_start)
            self._at_edge, self._blanks = False, self._lost_blanks
            self._say(self._dialect.call_start, parts)
        return call.rest

    def _say(self, text: str, parts: list[Part]) -> None:
        """Text of the current kind; blanks wait until it is clear whether a mark follows."""
        if self._at_edge:
            text = text.lstrip()
        if not text:
            return
        self._at_edge = False
        text = self._blanks + text
        self._blanks = ""
        if self.in_thought or self._tools is not None or self._dialect.think_start:
            kept = text.rstrip()
            text, self._blanks = kept, text[len(kept) :]
        if text:
            parts.append(ThoughtPart(text) if self.in_thought else TextPart(text))
