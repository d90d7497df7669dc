"""Stop strings, found in text while it grows.

The rule: generation ends at the first character that completes any stop string; when several are complete at
that character, the longest one (it began first) is cut out. So the earliest match wins, nothing waits for a
longer stop string once a shorter one is there, and the result does not depend on how the text was cut into
deltas.

All stop strings are followed at once by one Aho-Corasick automaton (Aho and Corasick, CACM 18(6), 1975). Its
depth is the length of the longest suffix of the text that begins some stop string: exactly what must be held
back. The cost is constant for each character, whatever the stop strings are, so no client can slow the loop
down with them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ..errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_STOPS = 16
MAX_STOP_CHARS = 512


class _Node:
    """One prefix of a stop string."""

    __slots__ = ("children", "depth", "fail", "match")

    def __init__(self, depth: int) -> None:
        self.children: dict[str, _Node] = {}
        self.depth = depth
        self.fail: _Node = self  # the longest proper suffix that is a prefix too; the root's is itself
        self.match: str | None = None  # the longest stop string that ends here


class StopMatcher:
    """Holds back what may become a stop string. One per stream, used by one thread.

    Attributes:
        matched: the stop string that was found; nothing may be fed afterwards.
    """

    __slots__ = ("_held", "_node", "_root", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        """Build the automaton.

        Args:
            stops: 1..16 strings of 1..512 characters.

        Raises:
            InvalidRequest: for any other list of strings.
        """
        check_stops(stops)
        self._root = self._node = _build(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take more text; return what cannot belong to a stop string, or all before the one that matched."""
        root, node = self._root, self._node
        for count, char in enumerate(text, 1):
            following = node.children.get(char)
            while following is None and node is not root:
                node = node.fail
                following = node.children.get(char)
            node = following or root
            if node.match is not None:
                return self._cut(text[:count], node.match)
        self._node = node
        seen = self._held + text
        safe_chars = len(seen) - node.depth
        self._held = seen[safe_chars:]
        return seen[:safe_chars]

    def flush(self) -> str:
        """The text still held, which no stop string completed."""
        held, self._held, self._node = self._held, "", self._root
        return held

    def _cut(self, text: str, stop: str) -> str:
        seen = self._held + text
        self.matched, self._held = stop, ""
        return seen[: len(seen) - len(stop)]


def check_stops(stops: Sequence[str]) -> None:
    """Raise InvalidRequest unless there are at most 16 stop strings of 1..512 characters."""
    if isinstance(stops, str):
        raise TypeError("stop strings must be given as a sequence of strings")
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"at most {MAX_STOPS} stop strings are allowed, got {len(stops)}", param="stop")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"a stop string must have 1 to {MAX_STOP_CHARS} characters", param="stop")


def _build(stops: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.children.setdefault(char, _Node(node.depth + 1))
        node.match = stop
    _link(root)
    return root


def _link(root: _Node) -> None:
    # Breadth first: a node's fail link is shallower, so it is complete before the node needs it.
    queue = deque([root])
    while queue:
        node = queue.popleft()
        for char, child in node.children.items():
            child.fail = _longest_suffix(root, node, char)
            child.match = child.match or child.fail.match
            queue.append(child)


def _longest_suffix(root: _Node, node: _Node, char: str) -> _Node:
    while node is not root:
        node = node.fail
        if char in node.children:
            return node.children[char]
    return root
