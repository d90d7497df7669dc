"""JSON lines: everything that was measured, one object a line, so that reports can be made again later.

A line is `{"kind": "run" | "measurement", ...}`; a measurement carries its outcomes, so that any figure can be computed
from the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..measure import BenchPlan, Measurement
from .page import page

if TYPE_CHECKING:
    from typing import BinaryIO


class RunLine(msgspec.Struct, frozen=True, tag="run", tag_field="kind"):
    """What was run, where and when.

    Attributes:
        about: versions, machine, command.
        plan: of the load.
    """

    about: dict[str, Any]
    plan: BenchPlan


class MeasurementLine(msgspec.Struct, frozen=True, tag="measurement", tag_field="kind"):
    """One repeat."""

    measurement: Measurement


Line = RunLine | MeasurementLine
_DECODER = msgspec.json.Decoder(Line)


def write_line(file: BinaryIO, line: Line) -> None:
    """Append a line and hand it to the system, so that a run that is stopped keeps what it has."""
    file.write(msgspec.json.encode(line) + b"\n")
    file.flush()


def read_lines(path: Path) -> tuple[RunLine, list[Measurement]]:
    """A file's run and measurements. Raises OSError, or ValueError for a file that is none of ours.

    A last line without its end was cut off with the run, and is left out.
    """
    run: RunLine | None = None
    found = []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    for number, raw in enumerate(whole.splitlines(), start=1):
        try:
            line = _DECODER.decode(raw)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if isinstance(line, RunLine):
            run = line
        else:
            found.append(line.measurement)
    if run is None:
        raise ValueError(f"{path} holds no run")
    return run, found


class Results:
    """What a run has measured so far, written as it comes; leaving the block writes the page, also of a run cut short.

    Args:
        lines: file of JSON lines; None writes none.
        html: file of the page; None writes none.
    """

    def __init__(self, lines: str | None, html: str | None, about: dict[str, Any], plan: BenchPlan) -> None:
        self.measurements: list[Measurement] = []
        self._about = about
        self._plan = plan
        self._html = html
        self._file = Path(lines).open("wb") if lines else None  # noqa: SIM115  (closed on exit)
        self._write(RunLine(about, plan))

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._html and self.measurements:
            Path(self._html).write_text(page(self._about, self._plan, self.measurements))

    def add(self, measurement: Measurement) -> None:
        """Keep a repeat."""
        self.measurements.append(measurement)
        self._write(MeasurementLine(measurement))

    def _write(self, line: Line) -> None:
        if self._file is not None:
            write_line(self._file, line)
