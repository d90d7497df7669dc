"""Which charts a report has, from its measurements."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from ..figures.metrics import METRICS
from ..interleave import chosen, levels_of, targets_of
from ..stats import median
from .svg import Series, line_chart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..figures.metrics import Metric
    from ..figures.outcome import Outcome
    from ..measure import Measurement

TIMELINE_BUCKETS = 200
MIB = 1 << 20
MEMORY_METRICS = ("mlx_troupe_memory_active_bytes", "process_bytes", "process_resident_memory_bytes")
"""Those that a target has are drawn: what its device holds, and its process."""


def against_load(measurements: Sequence[Measurement]) -> list[str]:
    """Throughput, goodput and first token against the offered load: medians, and whiskers from least to most."""
    wanted = ("tok/s", "goodput/s", "ttft p50 ms", "ttft p99 ms", "gap p99 ms")
    unit = measurements[0].level.offered_unit
    by_name = {metric.name: metric for metric in METRICS}
    return [
        line_chart(
            f"{name} against load",
            unit,
            name,
            [_load_series(measurements, by_name[name], target) for target in targets_of(measurements)],
        )
        for name in wanted
    ]


def _load_series(measurements: Sequence[Measurement], metric: Metric, target: str) -> Series:
    points, spread = [], []
    for level in levels_of(measurements):
        own = chosen(measurements, level, target)
        values = [value for one in own if (value := metric.of(one.figures)) is not None]
        if values:
            offered = own[0].level.offered
            points.append((offered, median(values) or 0.0))
            spread.append((offered, min(values), max(values)))
    order = sorted(range(len(points)), key=lambda place: points[place])
    return Series(target, [points[i] for i in order], [spread[i] for i in order], dots=True)


def of_level(measurements: Sequence[Measurement], level: str) -> list[str]:
    """Latency distributions over all repeats, then the gaps and the memory of the last repeat over time."""
    targets = targets_of(measurements)
    own = {target: chosen(measurements, level, target) for target in targets}
    charts = [
        line_chart(
            f"{title}, distribution",
            "milliseconds",
            "share of cases, %",
            [_distribution(own[target], values, target) for target in targets],
            logarithmic=True,
        )
        for title, values in _LATENCIES
    ]
    charts.append(
        line_chart(
            "Longest gap, over time",
            "seconds from the start",
            "milliseconds",
            [gap_timeline(own[target][-1], target) for target in targets if own[target]],
        )
    )
    charts.append(
        line_chart(
            "Memory, over time",
            "seconds from the start",
            "MiB",
            [series for target in targets if own[target] for series in _memory(own[target][-1], target)],
        )
    )
    return charts


def _first_ms(outcome: Outcome) -> list[float]:
    return [] if outcome.first_token_s is None else [outcome.first_token_s * 1e3]


def _gaps_ms(outcome: Outcome) -> list[float]:
    return [gap * 1e3 for gap in outcome.gaps_s()]


def _whole_ms(outcome: Outcome) -> list[float]:
    return [outcome.whole_s * 1e3] if outcome.good else []


_LATENCIES: tuple[tuple[str, Callable[[Outcome], list[float]]], ...] = (
    ("First token", _first_ms),
    ("Gap between arrivals", _gaps_ms),
    ("Whole request", _whole_ms),
)


def _distribution(measurements: Sequence[Measurement], values: Callable[[Outcome], list[float]], name: str) -> Series:
    """The cumulative distribution over all repeats, in percent."""
    found = sorted(
        value for one in measurements for outcome in one.outcomes if not outcome.error for value in values(outcome)
    )
    return Series(name, [(value, 100.0 * (place + 1) / len(found)) for place, value in enumerate(found)])


def gap_timeline(measurement: Measurement, name: str) -> Series:
    """The longest gap that ended in each slice of the repeat, milliseconds."""
    width_s = max(measurement.figures.wall_s, 1e-9) / TIMELINE_BUCKETS
    longest: dict[int, float] = {}
    for outcome in measurement.outcomes:
        for before_s, after_s in pairwise(sorted(set(outcome.text_times_s))):
            bucket = int(after_s / width_s)
            longest[bucket] = max(longest.get(bucket, 0.0), (after_s - before_s) * 1e3)
    points = [((bucket + 0.5) * width_s, gap_ms) for bucket, gap_ms in sorted(longest.items())]
    return Series(name, points, stems=True)


def _memory(measurement: Measurement, name: str) -> list[Series]:
    """One line for each memory metric that the target has, in MiB."""
    found = []
    for metric in MEMORY_METRICS:
        points = [
            (max(0.0, sample.at_s), sample.values[metric] / MIB)
            for sample in measurement.samples
            if metric in sample.values
        ]
        if points:
            found.append(Series(f"{name}: {metric}", points))
    return found
