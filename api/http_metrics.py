"""Prometheus metrics of the HTTP side, in a registry of their own; the runtime has its own.

Label values come from closed sets: routes are the registered patterns, never what a client wrote.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

PREFIX = "mlx_troupe_http"
_SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class HttpMetrics:
    """Counters of one application."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            f"{PREFIX}_requests",
            "Requests answered; 499 is a client that left",
            ["route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            f"{PREFIX}_request_duration_seconds",
            "From the request's headers to the end of its answer",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._in_progress = Gauge(f"{PREFIX}_requests_in_progress", "Requests being answered", registry=self._registry)
        self._errors = Counter(
            f"{PREFIX}_errors", "Requests refused or failed, by the error's code", ["code"], registry=self._registry
        )
        self._disconnects = Counter(
            f"{PREFIX}_disconnects", "Clients that left before their answer's end", ["stage"], registry=self._registry
        )

    def started(self) -> None:
        """A request's headers are there."""
        self._in_progress.inc()

    def ended(self, route: str, status: int, seconds: float) -> None:
        """A request has been answered, or its client is gone (499)."""
        self._in_progress.dec()
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def failed(self, code: str) -> None:
        """An answer was an error."""
        self._errors.labels(code).inc()

    def disconnected(self, stage: str) -> None:
        """A client left: stage "body", "queued", "prefill", "decode", "answer" (one that is not streamed) or
        "unread" (cut off because it did not read)."""
        self._disconnects.labels(stage).inc()

    def exposition(self) -> bytes:
        """Text of all of them, for `/metrics`."""
        return generate_latest(self._registry)
