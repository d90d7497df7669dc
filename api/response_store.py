"""Answers that a later request may go on from. In memory, bounded in bytes, number and age; owned by the loop's thread.

Invariant `only_its_key_sees_a_response`: to everybody else it does not exist.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_RESPONSES = 10_000


class Stored(msgspec.Struct, frozen=True):
    """One answer.

    Attributes:
        owner: the key's name.
        messages: the whole conversation, the answer included, as templates take it.
        body: the response object in JSON.
        expires_s: clock time.
    """

    owner: str
    messages: tuple[Mapping[str, Any], ...]
    body: bytes
    expires_s: float
    size_bytes: int


class ResponseStore:
    """Keeps the latest answers.

    Args:
        max_bytes: of conversations and bodies together.
        ttl_s: an answer is forgotten after so long.
        now: seconds of a clock that never goes back.
    """

    def __init__(self, max_bytes: int, ttl_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self.size_bytes = 0
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._now = now
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    def put(self, name: str, owner: str, messages: tuple[Mapping[str, Any], ...], body: bytes) -> None:
        """Keep an answer; the oldest ones make room. One that is larger than all the room is not kept."""
        size_bytes = len(msgspec.json.encode(messages)) + len(body)
        if size_bytes > self._max_bytes:
            return
        self._stored[name] = Stored(owner, messages, body, self._now() + self._ttl_s, size_bytes)
        self.size_bytes += size_bytes
        while self.size_bytes > self._max_bytes or len(self._stored) > MAX_RESPONSES or self._oldest_is_stale():
            self._drop(next(iter(self._stored)))

    def get(self, name: str, owner: str) -> Stored | None:
        """An answer of this owner that is still kept."""
        found = self._stored.get(name)
        if found is None or found.owner != owner:
            return None
        if found.expires_s <= self._now():
            self._drop(name)
            return None
        return found

    def delete(self, name: str, owner: str) -> bool:
        """Forget an answer; False if there is none of that owner."""
        if self.get(name, owner) is None:
            return False
        self._drop(name)
        return True

    def _oldest_is_stale(self) -> bool:
        return bool(self._stored) and next(iter(self._stored.values())).expires_s <= self._now()

    def _drop(self, name: str) -> None:
        self.size_bytes -= self._stored.pop(name).size_bytes
