"""Runs a plan on one or several targets: the same load on each in turn, repeat by repeat.

Only one target is loaded at a time, so that a noisy minute of the machine hits all of them and the ratios of one repeat
hold; odd repeats run in the opposite order. Every target is warmed up at every level first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .figures.metrics import METRICS, estimate
from .measure import measure, warm_ups

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from .figures.metrics import Estimate, Metric
    from .measure import BenchPlan, Measurement, Watch
    from .targets.ask import Target


async def run_plan(
    targets: Sequence[Target], plan: BenchPlan, watch: Watch | None = None
) -> AsyncIterator[Measurement]:
    """Measure every level and repeat on every target, interleaved; each measurement as it is done."""
    for level in plan.levels:
        if warm_ups(plan, level):
            for target in targets:
                await measure(target, plan, level, -1, watch)
        for repeat in range(plan.repeats):
            for target in targets if repeat % 2 == 0 else reversed(targets):
                yield await measure(target, plan, level, repeat, watch)


def levels_of(measurements: Sequence[Measurement]) -> list[str]:
    """Labels of the levels, in order."""
    return list(dict.fromkeys(one.level.label for one in measurements))


def targets_of(measurements: Sequence[Measurement]) -> list[str]:
    """Names of the targets, in order."""
    return list(dict.fromkeys(one.target for one in measurements))


def chosen(measurements: Sequence[Measurement], level: str, target: str) -> list[Measurement]:
    """The repeats of one level on one target."""
    return [one for one in measurements if one.level.label == level and one.target == target]


def estimates(measurements: Sequence[Measurement]) -> dict[str, Estimate | None]:
    """Every metric over these repeats, by name."""
    return {metric.name: estimate([metric.of(one.figures) for one in measurements]) for metric in METRICS}


def ratios(measurements: Sequence[Measurement], metric: Metric, level: str, ours: str, other: str) -> list[float]:
    """For each repeat of the level, `ours` over `other`; repeats where either is missing or zero are left out."""
    values = {(one.repeat, one.target): metric.of(one.figures) for one in measurements if one.level.label == level}
    found = []
    for repeat in sorted({repeat for repeat, _ in values}):
        own, theirs = values.get((repeat, ours)), values.get((repeat, other))
        if own is not None and theirs:
            found.append(own / theirs)
    return found
