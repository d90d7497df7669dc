"""The figures that are compared and estimated: names, where they stand, and which way is better."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import msgspec

from ..stats import half_width_95

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .summary import Figures


class Metric(msgspec.Struct, frozen=True):
    """One figure.

    Attributes:
        name: in tables.
        path: field of `Figures`, and the key in it, if it is a spread.
        higher_is_better: so a ratio above 1 is good.
    """

    name: str
    path: tuple[str, ...]
    higher_is_better: bool = False

    def of(self, figures: Figures) -> float | None:
        """The value, None where nothing was measured."""
        found: Any = getattr(figures, self.path[0])
        for key in self.path[1:]:
            found = found[key]
        return None if found is None else float(found)


METRICS = (
    Metric("tok/s", ("tokens_per_s",), higher_is_better=True),
    Metric("req/s", ("requests_per_s",), higher_is_better=True),
    Metric("goodput/s", ("goodput_per_s",), higher_is_better=True),
    Metric("ttft p50 ms", ("ttft_ms", "p50")),
    Metric("ttft p99 ms", ("ttft_ms", "p99")),
    Metric("gap p50 ms", ("gap_ms", "p50")),
    Metric("gap p99 ms", ("gap_ms", "p99")),
    Metric("token p50 ms", ("per_token_ms", "p50")),
    Metric("e2e p50 ms", ("e2e_ms", "p50")),
    Metric("e2e p99 ms", ("e2e_ms", "p99")),
)


class Estimate(msgspec.Struct, frozen=True):
    """One metric over the repeats: its median, mean, and half the 95% confidence interval of the mean."""

    median: float
    mean: float
    half_width: float | None
    repeats: int

    def __str__(self) -> str:
        return shown(self.median) if self.half_width is None else f"{shown(self.mean)} ±{shown(self.half_width)}"


def estimate(values: Sequence[float | None]) -> Estimate | None:
    """The estimate from each repeat's value; None when no repeat has one."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Estimate(statistics.median(known), statistics.fmean(known), half_width_95(known), len(known))


def shown(value: float | None) -> str:
    """A figure in three digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
