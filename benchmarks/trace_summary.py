"""What a Chrome trace of the runtime says in a few figures: `mlx-troupe bench trace FILE`."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from .figures.metrics import shown
from .reports.table import aligned
from .stats import percentile

if TYPE_CHECKING:
    from pathlib import Path

WAITED_US = 100.0
"""A read that took less did not wait: the device was done before the host came."""
IDLE_CUT_US = 1e6
"""A longer pause of the device means that nobody asked for anything."""


class Steps(NamedTuple):
    """The device's steps, in microseconds.

    Attributes:
        number: how many.
        apart_us: from the end of one step to the end of the next.
        busy_us: lengths of their spans.
        idle_us: gaps between spans: the device had nothing to do, at most.
        unwaited: steps whose tokens the host did not have to wait for: it was the slower one.
    """

    number: int
    apart_us: list[float]
    busy_us: list[float]
    idle_us: list[float]
    unwaited: int

    @property
    def idle_share(self) -> float:
        """Part of the time between steps in which the device had nothing to do."""
        total = sum(self.busy_us) + sum(self.idle_us)
        return sum(self.idle_us) / total if total else 0.0


def summary(path: Path) -> str:
    """Tables of spans by name and thread, and the device's steps. Raises OSError, or ValueError for another file."""
    events = read_events(path)
    names = {event["tid"]: event["args"]["name"] for event in events if event.get("ph") == "M"}
    spans = [event for event in events if event.get("ph") == "X"]
    parts = [_by_name(spans, names)]
    if found := device_steps(spans):
        parts.append(
            f"{found.number} steps, {shown(percentile(found.apart_us, 50) / 1e3)} ms apart (p50), "
            f"{shown(percentile(found.apart_us, 90) / 1e3)} (p90); device idle at most {found.idle_share:.1%} of "
            f"the time between them; the host did not have to wait for {found.unwaited}"
        )
    return "\n\n".join(parts)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The file's events. Raises OSError, ValueError."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no trace: {error}") from None
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list) or not events:
        raise ValueError(f"{path} holds no events: the traced process has not ended well, or did nothing")
    return events


def device_steps(spans: list[dict[str, Any]]) -> Steps | None:
    """The steps on the device's track; None when there are fewer than two."""
    steps = sorted((span for span in spans if "waited_us" in span["args"]), key=lambda span: span["ts"])
    if len(steps) < 2:
        return None
    gaps = [(after["ts"] - before["ts"] - before["dur"]) for before, after in pairwise(steps)]
    ends = [span["ts"] + span["dur"] for span in steps]
    return Steps(
        number=len(steps),
        apart_us=[after - before for before, after in pairwise(ends) if after - before < IDLE_CUT_US],
        busy_us=[span["dur"] for span in steps],
        idle_us=[gap for gap in gaps if 0 < gap < IDLE_CUT_US],
        unwaited=sum(span["args"]["waited_us"] < WAITED_US for span in steps),
    )


def _by_name(spans: list[dict[str, Any]], names: dict[int, str]) -> str:
    lengths: dict[tuple[str, str], list[float]] = defaultdict(list)
    for span in spans:
        name = span["name"].rstrip("0123456789 ") or span["name"]
        lengths[names.get(span["tid"], str(span["tid"])), name].append(span["dur"])
    rows = [["thread | span", "count", "total ms", "p50 us", "p99 us"]]
    for (thread, name), found in sorted(lengths.items(), key=lambda entry: (entry[0][0], -sum(entry[1]))):
        figures = (sum(found) / 1e3, percentile(found, 50), percentile(found, 99))
        rows.append([f"{thread} | {name}", str(len(found)), *(shown(figure) for figure in figures)])
    return aligned(rows)
