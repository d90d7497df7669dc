"""Line charts as inline SVG, written by hand: axes, ticks, lines, legend. No script, no font, no library."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 46
COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#4a5568", "#975a16", "#0987a0")
"""Told apart in light and dark, and by most colour-blind readers in the first four."""
MOST_POINTS = 600
"""Of one line; more than the chart has pixels only make the page heavy."""


class Series(NamedTuple):
    """One line; `spread` are (x, low, high) whiskers. `stems` draws each point as a line from zero instead."""

    name: str
    points: Sequence[tuple[float, float]]
    spread: Sequence[tuple[float, float, float]] = ()
    dots: bool = False
    stems: bool = False


class Scale(NamedTuple):
    """Maps values to pixels; with `logarithmic`, powers of ten lie equally far apart."""

    low: float
    high: float
    first: float
    last: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value; one below the scale is at its low end."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return self.first + (value - low) / (high - low or 1.0) * (self.last - self.first)


def ticks(high: float, count: int = 5) -> list[float]:
    """Round values from 0 to at least `high`: steps of 1, 2 or 5 times a power of ten."""
    if not high > 0 or not math.isfinite(high):
        return [0.0, 1.0]
    rough = high / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999999)
    return [number * step for number in range(math.ceil(high / step - 1e-9) + 1)]


def powers(values: Sequence[float]) -> list[float]:
    """Powers of ten from below the least positive value to above the greatest, at least two."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    return [10.0**power for power in range(low, max(high, low + 1) + 1)]


def line_chart(title: str, x_label: str, y_label: str, series: Sequence[Series], *, logarithmic: bool = False) -> str:
    """A chart from zero (or with a logarithmic x axis); a note instead where there is nothing to draw."""
    drawn = [(one, COLOURS[number % len(COLOURS)]) for number, one in enumerate(series) if one.points]
    if not drawn:
        return f'<figure><figcaption>{escape(title)}</figcaption><p class="none">not measured</p></figure>'
    xs = [x for one, _ in drawn for x, _ in one.points]
    ys = [y for one, _ in drawn for _, y in one.points] + [high for one, _ in drawn for _, _, high in one.spread]
    x_ticks, y_ticks = powers(xs) if logarithmic else ticks(max(xs)), ticks(max(ys))
    x = Scale(x_ticks[0], x_ticks[-1], LEFT, WIDTH - RIGHT, logarithmic)
    y = Scale(0.0, y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [_axes(x, y, x_ticks, y_ticks, x_label, y_label), *(_line(one, colour, x, y) for one, colour in drawn)]
    legend = "".join(f'<span><i style="background:{colour}"></i>{escape(one.name)}</span>' for one, colour in drawn)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f'<figure><figcaption>{escape(title)}</figcaption>{svg}<p class="legend">{legend}</p></figure>'


def _axes(x: Scale, y: Scale, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str) -> str:
    parts = []
    for value in y_ticks:
        at = y.at(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    for value in x_ticks:
        at = x.at(value)
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_number(value)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    up = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text transform="translate(14 {up:.0f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>')
    return "".join(parts)


def _line(series: Series, colour: str, x: Scale, y: Scale) -> str:
    if series.stems:
        base = y.at(0.0)
        stems = [f"M{x.at(a):.1f} {base:.1f}V{y.at(b):.1f}" for a, b in thinned(series.points)]
        return f'<path stroke="{colour}" stroke-width="1.5" d="{"".join(stems)}"/>'
    points = thinned(series.points)
    path = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in points)
    parts = [f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" points="{path}"/>']
    for at, low, high in series.spread:
        parts.append(
            f'<line stroke="{colour}" x1="{x.at(at):.1f}" x2="{x.at(at):.1f}" '
            f'y1="{y.at(low):.1f}" y2="{y.at(high):.1f}"/>'
        )
    if series.dots or len(points) == 1:
        parts += [f'<circle fill="{colour}" r="3" cx="{x.at(a):.1f}" cy="{y.at(b):.1f}"/>' for a, b in points]
    return "".join(parts)


def thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most `MOST_POINTS` of them, the last one among them."""
    if len(points) <= MOST_POINTS:
        return points
    stride = math.ceil(len(points) / MOST_POINTS)
    kept = list(points[::stride])
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _number(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):g}{unit}"
    return f"{value:g}"
