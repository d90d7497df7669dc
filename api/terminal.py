"""What the command line writes: results to stdout, all else to stderr, progress only where somebody watches."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

    from .runtime_access import ProgressReport

REDRAW_S = 0.1
_BAR_CELLS = 24
_ERASE = "\r\x1b[2K"


def note(text: str) -> None:
    """A line for the user that is no result."""
    print(text, file=sys.stderr, flush=True)


def size(count: int) -> str:
    """Bytes for people: "1.4 GB"."""
    number = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


class ProgressBar:
    """Draws reports as a bar on one line. May be called from any one thread at a time; never blocks for long.

    Args:
        stream: where to draw.
        clock: seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._stage = ""
        self._drawn_at = float("-inf")

    def __call__(self, report: ProgressReport) -> None:
        """Draw a report, unless the last one was drawn just now."""
        complete = report.total is not None and report.done >= report.total
        now = self._clock()
        if report.stage == self._stage and not complete and now - self._drawn_at < REDRAW_S:
            return
        if report.stage != self._stage and self._stage:
            self._stream.write("\n")
        self._stage, self._drawn_at = report.stage, now
        self._stream.write(_ERASE + _line(report))
        self._stream.flush()

    def close(self) -> None:
        """Leave the line for what comes next."""
        if self._stage:
            self._stage = ""
            self._stream.write("\n")
            self._stream.flush()


def _line(report: ProgressReport) -> str:
    show = size if report.unit == "bytes" else str
    if not report.total:
        return f"{report.stage}: {show(report.done)}"
    share = min(1.0, report.done / report.total)
    cells = round(share * _BAR_CELLS)
    bar = "#" * cells + "." * (_BAR_CELLS - cells)
    return f"{report.stage}: [{bar}] {share:4.0%} of {show(report.total)}"


def progress_bar() -> ProgressBar | None:
    """A bar on stderr, or None when nobody watches it."""
    return ProgressBar(sys.stderr) if sys.stderr.isatty() else None
