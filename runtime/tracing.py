"""Records what happens when, on which thread, as a Chrome trace (chrome://tracing, ui.perfetto.dev).

Spans are kept in memory and written when the tracer closes; past `MAX_EVENTS` the oldest go, so a server may be traced
for days. A span costs 2 to 3 us, and without a tracer nothing is recorded at all: whoever can be traced
holds `Tracer | None`, or is a subclass that only a traced runtime makes (`engine/traced.py`, `disk/traced.py`).

Any thread may record; deque appends need no lock. Times are `time.perf_counter_ns`, the runtime's own clock.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import TroupeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .request import Request

logger = logging.getLogger(__name__)

MAX_EVENTS = 500_000
DEVICE_TRACK = 1
"""Thread id of the track that shows when the device was at work; real ids are addresses and far larger."""
NS_PER_US = 1e3
S_PER_NS = 1e-9


class Span(NamedTuple):
    """Something that lasted, on a track (a thread's id, or DEVICE_TRACK)."""

    name: str
    track: int
    began_ns: int
    ended_ns: int
    facts: dict[str, object]


class Stage(NamedTuple):
    """A stage of a request, which belongs to no thread."""

    name: str
    request_id: str
    began_s: float
    ended_s: float


class Tracer:
    """See the module.

    Args:
        path: file to write; made at once, so that a bad name is told at start.
        max_events: most events kept.

    Raises:
        TroupeError: the file cannot be written.
    """

    def __init__(self, path: str | Path, *, max_events: int = MAX_EVENTS) -> None:
        self.path = Path(path)
        self._spans: deque[Span] = deque(maxlen=max_events)
        self._stages: deque[Stage] = deque(maxlen=max_events)
        self._names: dict[int, str] = {DEVICE_TRACK: "device, as the host sees it"}
        try:
            self.path.write_text("[]")
        except OSError as error:
            raise TroupeError(f"the trace cannot be written to {self.path}: {error.strerror}", param="trace") from None

    def now(self) -> int:
        """Nanoseconds on the trace's clock."""
        return time.perf_counter_ns()

    def add(
        self, name: str, began_ns: int, *, track: int | None = None, ended_ns: int | None = None, **facts: object
    ) -> None:
        """Record what began at `began_ns` and ends now (or at `ended_ns`), on this thread's track or the one given."""
        self._add(Span(name, track or threading.get_ident(), began_ns, ended_ns or self.now(), facts))

    def _add(self, span: Span) -> None:
        if span.track not in self._names:
            self._names[span.track] = threading.current_thread().name
        self._spans.append(span)

    @contextmanager
    def span(self, name: str, **facts: object) -> Iterator[None]:
        """Record the block; one that raises is recorded too."""
        began_ns = self.now()
        try:
            yield
        finally:
            self._add(Span(name, threading.get_ident(), began_ns, self.now(), facts))

    def request_ended(self, request: Request, now_s: float) -> None:
        """Record the stages of a row's life: queue, prefill, decode."""
        row_id = f"{request.request_id}/{request.index}"
        marks = [
            ("queue", request.arrived_s),
            ("prefill", request.admitted_s),
            ("decode", request.running_s),
        ]
        reached = [(name, at_s) for name, at_s in marks if at_s is not None]
        ends = [at_s for _, at_s in reached[1:]] + [request.finished_s or now_s]
        for (name, began_s), ended_s in zip(reached, ends, strict=True):
            self._stages.append(Stage(name, row_id, began_s, ended_s))

    def close(self) -> None:
        """Write the file. What cannot be written is logged: a trace is never worth a failure."""
        temporary = self.path.with_name(self.path.name + ".part")
        try:
            with temporary.open("w") as file:
                file.write('{"displayTimeUnit": "ms", "traceEvents": [')
                for number, event in enumerate(self.events()):
                    file.write(",\n" if number else "\n")
                    file.write(json.dumps(event))
                file.write("\n]}\n")
            os.replace(temporary, self.path)
        except OSError as error:
            logger.error("the trace was not written: %s", error)
        else:
            logger.info("trace: %d events in %s", len(self._spans) + len(self._stages), self.path)

    def events(self) -> Iterator[dict[str, Any]]:
        """Everything recorded, in the trace's own form; times in microseconds from the first event."""
        spans, stages = list(self._spans), list(self._stages)
        origin_ns = min(
            min((span.began_ns for span in spans), default=self.now()),
            min((round(stage.began_s / S_PER_NS) for stage in stages), default=self.now()),
        )
        for track, name in list(self._names.items()):
            yield {"ph": "M", "name": "thread_name", "pid": 1, "tid": track, "args": {"name": name}}
        for span in spans:
            yield _span_event(span, origin_ns)
        for stage in stages:
            common = {"cat": "request", "name": stage.name, "id": stage.request_id, "pid": 1, "tid": DEVICE_TRACK}
            for kind, at_s in (("b", stage.began_s), ("e", stage.ended_s)):
                yield common | {"ph": kind, "ts": (at_s / S_PER_NS - origin_ns) / NS_PER_US}


def _span_event(span: Span, origin_ns: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "pid": 1,
        "tid": span.track,
        "ts": (span.began_ns - origin_ns) / NS_PER_US,
        "dur": (span.ended_ns - span.began_ns) / NS_PER_US,
        "args": span.facts,
    }


def open_tracer(path: str) -> Tracer | None:
    """A tracer that writes to `path`; None for an empty one. Raises TroupeError."""
    return Tracer(path) if path else None
