"""Tables for the terminal: plain text, figures to the right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..figures.metrics import METRICS, shown
from ..interleave import chosen, estimates, levels_of, ratios, targets_of
from ..stats import median

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..measure import BenchPlan, Measurement


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first to the left, others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def report(measurements: Sequence[Measurement], plan: BenchPlan) -> str:
    """A row a metric: mean ± 95% confidence over the repeats, and ratios of the first target; then what went wrong.

    One target gets one table with a column a level, several get a table a level.
    """
    if not measurements:
        return "nothing was measured"
    levels, targets = levels_of(measurements), targets_of(measurements)
    if len(targets) == 1:
        columns = [_figures(measurements, level, targets[0]) for level in levels]
        blocks = [_columns(targets[0], levels, columns)]
    else:
        blocks = [_level(measurements, level) for level in levels]
    notes = _notes(measurements, plan)
    return "\n\n".join([*blocks, *(["\n".join(notes)] if notes else [])])


def _level(measurements: Sequence[Measurement], level: str) -> str:
    ours, *others = targets_of(measurements)
    columns = [_figures(measurements, level, target) for target in (ours, *others)]
    columns += [[_ratio(ratios(measurements, metric, level, ours, other)) for metric in METRICS] for other in others]
    return _columns(level, [ours, *others, *(f"{ours} / {other}" for other in others)], columns)


def _figures(measurements: Sequence[Measurement], level: str, target: str) -> list[str]:
    found = estimates(chosen(measurements, level, target))
    return ["-" if one is None else str(one) for one in found.values()]


def _columns(corner: str, heads: Sequence[str], columns: Sequence[Sequence[str]]) -> str:
    rows = [[metric.name, *cells] for metric, *cells in zip(METRICS, *columns, strict=True)]
    return aligned([[corner, *heads], *rows])


def _ratio(values: Sequence[float]) -> str:
    if not values:
        return "-"
    middle = f"{median(values):.2f}x"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f}-{max(values):.2f})"


def _notes(measurements: Sequence[Measurement], plan: BenchPlan) -> list[str]:
    """Facts that the figures need beside them."""
    lines = [f"goodput: requests a second with {plan.objective}; ± is a 95% confidence interval over repeats"]
    for target in targets_of(measurements):
        own = [one.figures for one in measurements if one.target == target]
        errors: dict[str, int] = {}
        for figures in own:
            for kind, count in figures.errors.items():
                errors[kind] = errors.get(kind, 0) + count
        told = [f"{sum(figures.requests for figures in own)} requests"]
        if errors:
            told.append("errors: " + ", ".join(f"{count} {kind}" for kind, count in sorted(errors.items())))
        if left := sum(figures.left for figures in own):
            told.append(f"{left} left early")
        if short := sum(figures.short for figures in own):
            told.append(f"{short} ended before max_tokens")
        if cached := sum(figures.cached_tokens for figures in own):
            told.append(f"{cached / max(1, sum(figures.prompt_tokens for figures in own)):.0%} of prompt tokens cached")
        told.append(f"{shown(median([figures.tokens_per_arrival for figures in own]))} tokens an arrival")
        told.append(f"counted by {'+'.join(sorted({figures.count_source for figures in own if figures.count_source}))}")
        late_ms = max((figures.send_lag_ms["p99"] or 0.0 for figures in own), default=0.0)
        if late_ms > LATE_MS:
            told.append(f"THE CLIENT WAS LATE by {late_ms:.0f} ms (p99): it, or its machine, is the limit")
        lines.append(f"{target}: {', '.join(told)}")
    return lines


LATE_MS = 50.0
"""Sending later than this beyond the intended time says that the client could not keep up."""
