"""A stream's writer with the runtime's tracer: every write to its socket is recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .streaming import EventStreamWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from ..runtime.tracing import Tracer


class TracedWriter(EventStreamWriter):
    """See `EventStreamWriter`."""

    tracer: Tracer

    def write_now(self, data: bytes) -> None:
        """See `EventStreamWriter.write_now`."""
        with self.tracer.span("socket write", bytes=len(data)):
            super().write_now(data)


def make_writer(
    tracer: Tracer | None,
    request: web.Request,
    *,
    write_timeout_s: float,
    write_buffer_bytes: int,
    on_cut: Callable[[], None],
) -> EventStreamWriter:
    """A writer, traced if there is a tracer."""
    kind = EventStreamWriter if tracer is None else TracedWriter
    writer = kind(request, write_timeout_s=write_timeout_s, write_buffer_bytes=write_buffer_bytes, on_cut=on_cut)
    if isinstance(writer, TracedWriter) and tracer is not None:
        writer.tracer = tracer
    return writer
