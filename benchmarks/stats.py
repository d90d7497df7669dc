"""Small statistics over measured times."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile; nan of nothing."""
    if not values:
        return math.nan
    rank = max(1, math.ceil(len(values) * percent / 100))
    return sorted(values)[rank - 1]


def summary_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p90, p99 and max in milliseconds, None where nothing was measured."""
    return {name: _finite(percentile(seconds, percent) * 1e3) for name, percent in PERCENTILES.items()}


def median(values: Sequence[float | None]) -> float | None:
    """The median of the values that exist."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _finite(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None


T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Two-sided 95% points of Student's t for 1 to 10 degrees of freedom; beyond, the normal one is close enough."""
NORMAL_95 = 1.96


def half_width_95(values: Sequence[float]) -> float | None:
    """Half the 95% confidence interval of the mean, by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    t = T_95[freedom - 1] if freedom <= len(T_95) else NORMAL_95
    return t * statistics.stdev(values) / math.sqrt(len(values))
