"""Tells a step that hangs from a process that was stopped."""

from __future__ import annotations


class StepWatch:
    """Judges the age of the oldest step by looks a while apart.

    When looks come late, the whole process was stopped (a debugger, SIGSTOP), and the step was not at fault: that time
    does not count against it.

    Args:
        limit_s: age at which a step is given up.
        interval_s: time between two looks.
    """

    def __init__(self, limit_s: float, interval_s: float) -> None:
        self._limit_s = limit_s
        self._interval_s = interval_s
        self._looked_s: float | None = None
        self._age_s = 0.0
        self._stopped_s = 0.0

    def overdue(self, now_s: float, age_s: float | None) -> bool:
        """Whether the step has hung for too long; `age_s` is None when nothing runs."""
        late_s = 0.0 if self._looked_s is None else now_s - self._looked_s - self._interval_s
        self._looked_s = now_s
        if age_s is None or age_s < self._age_s:  # another step
            self._stopped_s = 0.0
        self._age_s = age_s or 0.0
        if late_s > 2 * self._interval_s and age_s is not None:
            self._stopped_s += min(late_s, age_s)
        return age_s is not None and age_s - self._stopped_s > self._limit_s
