"""The watchdog's judgement: a step that hangs is told from a process that was stopped."""

from __future__ import annotations

import pytest

from mlx_troupe.runtime.step_watch import StepWatch


@pytest.mark.parametrize(
    ("looks", "overdue"),
    [
        ([(0, None), (1, None), (100, None)], False),
        ([(t, t) for t in range(12)], True),
        ([(t, t) for t in range(11)], False),
        ([(t, t % 5) for t in range(100)], False),
        ([(0, 0), (1, 1), (300, 300)], False),
        ([(0, 0), (1, 1), (300, 300), *((300 + t, 300 + t) for t in range(1, 12))], True),
        ([(0, None), (300, 5), *((300 + t, 5 + t) for t in range(1, 5))], False),
        ([(0, 0), (300, 300), (301, 1), *((301 + t, 1 + t) for t in range(1, 11))], True),
    ],
)
def test_overdue(looks: list[tuple[float, float | None]], overdue: bool) -> None:
    watch = StepWatch(limit_s=10.0, interval_s=1.0)
    assert any(watch.overdue(now_s, age_s) for now_s, age_s in looks) is overdue
