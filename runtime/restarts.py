"""How often, and how soon, what failed is started anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .clock import Clock

WINDOW_S = 600.0
FIRST_BACKOFF_S = 0.25


class RestartBudget:
    """Counts failures within the last WINDOW_S.

    Args:
        limit: so many restarts within the window; 0 is never.
        clock: of the failures.
    """

    def __init__(self, limit: int, clock: Clock) -> None:
        self._limit = limit
        self._clock = clock
        self._failed_s: list[float] = []

    def failed(self) -> None:
        """It failed now."""
        self._failed_s.append(self._clock.now())

    @property
    def failures(self) -> int:
        """How many there were within the window."""
        now_s = self._clock.now()
        self._failed_s = [failed_s for failed_s in self._failed_s if now_s - failed_s < WINDOW_S]
        return len(self._failed_s)

    @property
    def spent(self) -> bool:
        """It failed too often to be started again."""
        return self.failures > self._limit

    @property
    def backoff_s(self) -> float:
        """How long to wait before the next start; doubles with each failure."""
        return FIRST_BACKOFF_S * float(2 ** max(0, self.failures - 1))
