"""One line on stderr that is drawn again while a load runs; lines of their own where nobody watches."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ..measure import Measurement
    from ..targets.ask import Target
    from ..traffic.arrivals import Level
    from ..traffic.drive import Tally

REDRAW_S = 0.5
_ERASE = "\r\x1b[K"


class Progress:
    """What is running now. `watch` is called when a repeat begins; `ticking` draws until its block ends.

    Args:
        stream: where to draw.
        live: whether a line may be drawn again (a terminal).
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty() if live is None else live
        self._now: tuple[Target, Level, int, Tally] | None = None
        self._began_s = 0.0
        self._drawn: tuple[float, int] = (0.0, 0)

    def watch(self, target: Target, level: Level, repeat: int, tally: Tally) -> None:
        """A repeat begins."""
        self._now = target, level, repeat, tally
        self._began_s = asyncio.get_running_loop().time()
        self._drawn = (self._began_s, target.received())

    def line(self) -> str:
        """The line as it stands now."""
        if self._now is None:
            return ""
        target, level, repeat, tally = self._now
        now_s, received = asyncio.get_running_loop().time(), target.received()
        since_s, before = self._drawn
        rate = (received - before) / (now_s - since_s) if now_s > since_s else 0.0
        self._drawn = now_s, received
        name = "warm-up" if repeat < 0 else f"repeat {repeat + 1}"
        counts = f"{tally.ended} done, {tally.begun - tally.ended} running, {rate:,.0f} pieces/s"
        return f"{target.name} | {level.label} | {name} | {now_s - self._began_s:.0f} s | {counts}"

    def done(self, measurement: Measurement) -> None:
        """A repeat has ended."""
        figures = measurement.figures
        errors = f", {sum(figures.errors.values())} errors" if figures.errors else ""
        text = f"{measurement.target} | {measurement.level.label} | repeat {measurement.repeat + 1} | "
        text += f"{figures.tokens_per_s:,.0f} tok/s, ttft p50 {figures.ttft_ms['p50']} ms{errors}"
        self._stream.write(f"{_ERASE if self._live else ''}{text}\n")
        self._stream.flush()

    @asynccontextmanager
    async def ticking(self) -> AsyncIterator[None]:
        """Draw the line now and then while the block runs, where a terminal shows it."""
        drawing = asyncio.create_task(self._draw_often()) if self._live else None
        try:
            yield
        finally:
            if drawing is not None:
                drawing.cancel()
                await asyncio.gather(drawing, return_exceptions=True)
                self._stream.write(_ERASE)
                self._stream.flush()

    async def _draw_often(self) -> None:
        while True:
            await asyncio.sleep(REDRAW_S)
            self._stream.write(_ERASE + self.line()[:160])
            self._stream.flush()
