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
    """Every level: a row a target with mean ± 95% confidence over the repeats, then ratios, then what went wrong."""
    if not measurements:
        return "nothing was measured"
    blocks = [_level(measurements, level) for level in levels_of(measurements)]
    notes = _notes(measurements, plan)
    return "\n\n".join([*blocks, *(["\n".join(notes)] if notes else [])])


def _level(measurements: Sequence[Measurement], level: str) -> str:
    targets = targets_of(measurements)
    rows = [[level, *(metric.name for metric in METRICS)]]
    for target in targets:
        found = estimates(chosen(measurements, level, target))
        rows.append([f"  {target}", *("-" if one is None else str(one) for one in found.values())])
    ours = targets[0]
    for other in targets[1:]:
        worked = [ratios(measurements, metric, level, ours, other) for metric in METRICS]
        rows.append([f"  {ours} / {other}", *(_ratio(values) for values in worked)])
    return aligned(rows)


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
