"""Finds marks in text that grows, and the end of JSON in it. Linear in the text, whatever it holds."""

from __future__ import annotations


class JsonScan:
    """Follows one JSON value, an object or a list, character by character."""

    __slots__ = ("_depth", "_escaped", "_quoted", "done")

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self.done = False

    def feed(self, text: str) -> int:
        """How many characters of `text` belong to the value."""
        for place, character in enumerate(text):
            if self.done:
                return place
            if self._quoted:
                self._in_string(character)
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                self.done = self._depth <= 0
        return len(text)

    @property
    def in_string(self) -> bool:
        """The text so far ends inside a string."""
        return self._quoted

    def _in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._quoted = False


def held_back(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that begins one of `marks` without being all of it."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    for length in range(longest, 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


def first_mark(text: str, marks: tuple[str, ...]) -> tuple[int, str]:
    """Place and text of the mark that comes first, the longest one at a place; (-1, "") when there is none."""
    found = [(text.find(mark), -len(mark), mark) for mark in marks if mark in text]
    if not found:
        return -1, ""
    place, _, mark = min(found)
    return place, mark
