"""OpenTelemetry: a span a request, with what happened to it as events. Off unless asked for, and costs nothing then.

A span starts when the headers are there and ends with the answer; its parent is the client's `traceparent`. Its events
`queued`, `prefill` and `decode` carry the times that the runtime measured. Attributes follow the conventions for HTTP
servers and for generative AI (https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/); prompts and answers
are never among them.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..runtime.events import Finished

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..runtime.events import Event, Usage
    from .sources import Events

NANOSECONDS = 1_000_000_000


class RequestSpan:
    """A request nobody traces."""

    records = False

    def asked(self, model: str, choices: int) -> None:
        """The request was understood."""

    def choice_ended(self, reason: str, usage: Usage) -> None:
        """One choice has ended by itself."""


class Tracing:
    """No tracing."""

    @contextmanager
    def request(self, method: str, route: str, headers: Mapping[str, str], request_id: str) -> Iterator[RequestSpan]:
        """A span around a request's answer."""
        yield _UNTRACED

    def answered(self, span: RequestSpan, status: int, error_code: str | None) -> None:
        """What the answer was; just before the block ends."""

    def close(self) -> None:
        """Send what has not been sent."""


_UNTRACED = RequestSpan()
NO_TRACING = Tracing()


class OpenTelemetrySpan(RequestSpan):
    """A request's span. Owned by the event loop's thread."""

    records = True

    def __init__(self, span: Any, started_ns: int) -> None:  # noqa: ANN401
        self.span = span
        self._started_ns = started_ns
        self._reasons: list[str] = []
        self._written = 0

    def asked(self, model: str, choices: int) -> None:
        """See RequestSpan."""
        self.span.set_attributes({"gen_ai.request.model": model, "gen_ai.request.choice.count": choices})

    def choice_ended(self, reason: str, usage: Usage) -> None:
        """See RequestSpan."""
        first = not self._reasons
        self._reasons.append(reason)
        self._written += usage.completion_tokens
        self.span.set_attributes(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.usage.output_tokens": self._written,
                "gen_ai.response.finish_reasons": tuple(self._reasons),
            }
        )
        if first:
            admitted_ns = self._started_ns + round(usage.queue_s * NANOSECONDS)
            self.span.add_event("queued", {"seconds": usage.queue_s}, self._started_ns)
            self.span.add_event("prefill", {"seconds": usage.prefill_s}, admitted_ns)
            running_ns = admitted_ns + round(usage.prefill_s * NANOSECONDS)
            self.span.add_event("decode", {"seconds": usage.decode_s}, running_ns)


class OpenTelemetryTracing(Tracing):
    """Spans for a tracer provider.

    Args:
        provider: of the OpenTelemetry SDK.
        owned: whether `close` shuts it down.
    """

    def __init__(self, provider: Any, *, owned: bool) -> None:  # noqa: ANN401
        from opentelemetry import trace
        from opentelemetry.propagate import extract

        self._trace = trace
        self._extract = extract
        self._provider = provider
        self._owned = owned
        self._tracer = provider.get_tracer("mlx-troupe")

    @contextmanager
    def request(self, method: str, route: str, headers: Mapping[str, str], request_id: str) -> Iterator[RequestSpan]:
        """See Tracing."""
        started_ns = time.time_ns()
        known = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span(
            f"{method} {route}",
            context=self._extract(known),
            kind=self._trace.SpanKind.SERVER,
            start_time=started_ns,
            attributes={
                "http.request.method": method,
                "http.route": route,
                "gen_ai.provider.name": "mlx_troupe",
                "mlx_troupe.request_id": request_id,
            },
        )
        try:
            yield OpenTelemetrySpan(span, started_ns)
        finally:
            span.end()

    def answered(self, span: RequestSpan, status: int, error_code: str | None) -> None:
        """See Tracing."""
        assert isinstance(span, OpenTelemetrySpan)
        span.span.set_attribute("http.response.status_code", status)
        if error_code is not None:
            span.span.set_attribute("error.type", error_code)
        if status >= 499 or (error_code is not None and status < 400):
            span.span.set_status(self._trace.StatusCode.ERROR)

    def close(self) -> None:
        """See Tracing."""
        if self._owned:
            self._provider.shutdown()


class Watched:
    """A source of events whose ends a span hears."""

    def __init__(self, source: Events, span: RequestSpan) -> None:
        self._source = source
        self._span = span

    async def take(self) -> list[Event]:
        """See Events."""
        events = await self._source.take()
        for event in events:
            if isinstance(event, Finished):
                self._span.choice_ended(event.reason, event.usage)
        return events


def tracing_to_collector() -> Tracing:
    """Tracing to the collector that the standard `OTEL_...` variables name, or to the provider that is set already
    (as `opentelemetry-instrument` does). Raises ImportError without the packages of the extra `otel`."""
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    existing = trace.get_tracer_provider()
    if isinstance(existing, TracerProvider):
        return OpenTelemetryTracing(existing, owned=False)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "mlx-troupe"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OpenTelemetryTracing(provider, owned=True)
