"""Time as a parameter: policies take a Clock, tests turn its hands."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds."""

    def now(self) -> float:
        """Seconds since an arbitrary origin, never going back."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds from `time.perf_counter`."""
        return time.perf_counter()


class ManualClock:
    """A clock that moves only when told to; for tests."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """The time last set."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the time forward."""
        self._now_s += seconds
