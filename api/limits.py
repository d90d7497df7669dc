"""How much one key may ask: requests at once, and requests a minute. Owned by the event loop's thread.

Who has no key shares the limits of "anonymous". Refusals are 429 with the time after which to try again.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .errors import RATE_LIMIT, ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUSY_RETRY_AFTER_S = 1.0
_MINUTE_S = 60.0


class KeyLimits:
    """Limits for each key by itself.

    Args:
        most_at_once: requests at once; None is no limit.
        most_a_minute: requests a minute, of which so many may come in one burst; None is no limit.
        now: seconds of a clock that never goes back.
    """

    def __init__(
        self, most_at_once: int | None, most_a_minute: int | None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_at_once = most_at_once
        self._most_a_minute = most_a_minute
        self._now = now
        self._at_once: dict[str, int] = {}
        self._tokens: dict[str, tuple[float, float]] = {}

    @contextmanager
    def admitted(self, name: str) -> Iterator[None]:
        """Hold one of the key's places. Raises ApiError (429)."""
        count = self._at_once.get(name, 0)
        if self._most_at_once is not None and count >= self._most_at_once:
            message = f"{count} requests of this key are running, the most it may have"
            raise _refused(message, "concurrency_limit_exceeded", BUSY_RETRY_AFTER_S)
        self._spend(name)
        self._at_once[name] = count + 1
        try:
            yield
        finally:
            self._at_once[name] -= 1
            if not self._at_once[name]:
                del self._at_once[name]

    def _spend(self, name: str) -> None:
        if self._most_a_minute is None:
            return
        now = self._now()
        level, since = self._tokens.get(name, (float(self._most_a_minute), now))
        rate = self._most_a_minute / _MINUTE_S
        level = min(float(self._most_a_minute), level + (now - since) * rate)
        if level < 1:
            self._tokens[name] = (level, now)
            message = f"this key may send {self._most_a_minute} requests a minute"
            raise _refused(message, "rate_limit_exceeded", math.ceil((1 - level) / rate))
        self._tokens[name] = (level - 1, now)


def _refused(message: str, code: str, retry_after_s: float) -> ApiError:
    return ApiError(message, status=429, kind=RATE_LIMIT, code=code, retry_after_s=retry_after_s)
