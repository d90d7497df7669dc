"""Prometheus metrics of one runtime, in a registry of its own. Names follow vLLM's suffixes; units are base units."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from .cache_metrics import cache_families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.metrics_core import Metric

    from .request import Request
    from .service import Statistics

PREFIX = "mlx_troupe_"
LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class QuickHistogram:
    """A histogram for what happens every token: prometheus-client's own takes a lock and a loop each time."""

    def __init__(self, name: str, text: str, model: str) -> None:
        self._name, self._text, self._model = name, text, model
        self._counts = [0] * (len(LATENCY_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float, /) -> None:
        """Count one value."""
        self._counts[bisect_left(LATENCY_BUCKETS_S, seconds)] += 1
        self._sum_s += seconds

    def family(self) -> Metric:
        """What a scrape shows."""
        family = HistogramMetricFamily(PREFIX + self._name, self._text, labels=["model_name"])
        bounds = [str(float(bound)) for bound in LATENCY_BUCKETS_S] + ["+Inf"]
        family.add_metric([self._model], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum_s)
        return family


class RuntimeMetrics(Collector):
    """Counts what happens to requests. Owned by the event loop's thread.

    Args:
        model: value of the label model_name.
        statistics: snapshot for the gauges, read at scrape time.
    """

    def __init__(self, model: str, statistics: Callable[[], Statistics]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._model = model
        self._statistics = statistics
        self.registry.register(self)
        self._time_to_first = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self.gaps = QuickHistogram("inter_token_latency_seconds", "Between two tokens of one row.", model)
        self._total = self._histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self._queue = self._histogram("request_queue_time_seconds", "Waiting for admission.")
        self._prefill = self._histogram("request_prefill_time_seconds", "From admission to the first decode step.")
        self._decode = self._histogram("request_decode_time_seconds", "From the first decode step to the end.")
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self._output = self._histogram("request_generation_tokens", "Output tokens of a choice.", TOKEN_BUCKETS)
        self._ended = self._counter("request_success", "Choices that ended, by reason.", "finished_reason")
        self._failed = self._counter("request_failure", "Choices that failed, by code.", "code")
        self._refused = self._counter("request_rejected", "Requests refused before any work, by code.", "code")
        self._cancelled = self._counter("request_cancelled", "Choices cancelled, by the state they were in.", "stage")
        self._prompt_total = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self._cached_total = self._counter("prompt_tokens_cached", "Prompt tokens that came from the prefix cache.")
        loading = Gauge(PREFIX + "model_load_seconds", "Time it took to load.", ["model_name"], registry=self.registry)
        self._loading = loading.labels(model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS_S) -> Histogram:
        metric = Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return metric.labels(self._model)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        metric = Counter(PREFIX + name, text, ["model_name", *labels], registry=self.registry)
        return metric if labels else metric.labels(self._model)

    def loaded(self, seconds: float) -> None:
        """The model is ready after `seconds`."""
        self._loading.set(seconds)

    def refused(self, code: str) -> None:
        """A request was refused before any work."""
        self._refused.labels(self._model, code).inc()

    def ended(self, request: Request) -> None:
        """A choice has ended, in whatever way."""
        reason = str(request.finish_reason)
        if reason.startswith(("error:", "rejected:")):
            self._failed.labels(self._model, reason.partition(":")[2]).inc()
        else:
            self._ended.labels(self._model, reason).inc()
        if reason == "cancelled":
            stage = "queue" if request.admitted_s is None else "prefill" if request.running_s is None else "decode"
            self._cancelled.labels(self._model, stage).inc()
        self._times(request)

    def _times(self, request: Request) -> None:
        end_s = request.finished_s if request.finished_s is not None else request.arrived_s
        usage = request.usage(end_s)
        self._total.observe(end_s - request.arrived_s)
        self._queue.observe(usage.queue_s)
        if request.admitted_s is not None and request.index == 0:
            self._prompt.observe(usage.prompt_tokens)
            self._prompt_total.inc(usage.prompt_tokens)
            self._cached_total.inc(usage.cached_tokens)
        if request.running_s is not None:
            self._prefill.observe(usage.prefill_s)
            self._decode.observe(usage.decode_s)
            self._output.observe(usage.completion_tokens)
        if request.first_token_s is not None:
            self._time_to_first.observe(request.first_token_s - request.arrived_s)

    def collect(self) -> Iterator[Metric]:
        """Gauges and counters read from the runtime at scrape time (called by the registry)."""
        now = self._statistics()
        gauges = {
            "num_requests_running": now.running,
            "num_requests_prefilling": now.prefilling,
            "num_requests_waiting": now.waiting,
            "memory_active_bytes": now.memory_active_bytes,
            "memory_pool_bytes": now.memory_pool_bytes,
            "memory_peak_bytes": now.memory_peak_bytes,
            "last_step_age_seconds": now.last_step_age_s or 0.0,
        }
        for name, value in gauges.items():
            yield self._family(GaugeMetricFamily, name, value)
        counters = {
            "generation_tokens": now.completion_tokens,
            "engine_steps": now.steps,
            "engine_restarts": now.restarts,
            "requests_requeued": now.requeued,
            "requests_preempted": now.preempted,
            "prefill_chunks": now.chunks,
            "prefill_chunks_throttled": now.throttled_chunks,
            "prefill_chunks_crowded": now.crowded_chunks,
            "prefix_cache_queries": now.cache.queried_tokens,
            "prefix_cache_hits": now.cache.hit_tokens,
        }
        for name, value in counters.items():
            yield self._family(CounterMetricFamily, name, value)
        yield self.gaps.family()
        holds = CounterMetricFamily(
            PREFIX + "admission_holds", "How often the head of the queue was held.", labels=["model_name", "reason"]
        )
        for reason, count in now.holds.items():
            holds.add_metric([self._model, reason], count)
        yield holds
        yield from cache_families(now.cache, PREFIX, self._model)
        yield from self._actors(now)

    def _family(self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, value: float) -> Metric:
        family = kind(PREFIX + name, name.replace("_", " "), labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _actors(self, now: Statistics) -> Iterator[Metric]:
        depth = GaugeMetricFamily(PREFIX + "actor_inbox_depth", "Messages waiting.", labels=["model_name", "actor"])
        handled = CounterMetricFamily(PREFIX + "actor_messages", "Messages handled.", labels=["model_name", "actor"])
        busy = CounterMetricFamily(
            PREFIX + "actor_busy_seconds", "Time spent handling.", labels=["model_name", "actor"]
        )
        for name, actor in now.actors.items():
            depth.add_metric([self._model, name], actor.depth)
            handled.add_metric([self._model, name], actor.handled)
            busy.add_metric([self._model, name], actor.busy_s)
        yield from (depth, handled, busy)

    def exposition(self) -> bytes:
        """The text a scraper reads."""
        return generate_latest(self.registry)
