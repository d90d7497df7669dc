"""The prefix cache's metrics, made from a snapshot at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from .service import CacheStatistics


def cache_families(now: CacheStatistics, prefix: str, model: str) -> Iterator[Metric]:
    """All families; names are `prefix` and "prefix_cache_...", prompts by where their prefix came from."""
    counters = {
        "requests": (now.queries, "Prompts looked up."),
        "saved_tokens": (now.hit_tokens, "Prompt tokens that were not computed."),
        "stores": (now.stored_pages, "Pages stored."),
        "spills": (now.spilled_pages, "Pages written to disk."),
        "spill_drops": (now.dropped_spills, "Pages that were not written to disk."),
        "restores": (now.restored_pages, "Pages brought back from disk."),
        "restore_seconds": (now.restore_s, "Seconds that requests waited for pages from disk."),
        "restore_timeouts": (now.restore_timeouts, "Requests that did not wait any longer for pages from disk."),
        "lost_pages": (now.lost_pages, "Pages lost by a fault."),
        "disk_faults": (now.disk_faults, "Writes to disk that failed."),
    }
    for name, (value, text) in counters.items():
        counter = CounterMetricFamily(f"{prefix}prefix_cache_{name}", text, labels=["model_name"])
        counter.add_metric([model], value)
        yield counter
    hits = CounterMetricFamily(f"{prefix}prefix_cache_found", "Prompts found.", labels=["model_name", "source"])
    for source, value in (("ram", now.hits_ram), ("disk", now.hits_disk), ("partial", now.hits_partial)):
        hits.add_metric([model, source], value)
    yield hits
    evictions = CounterMetricFamily(f"{prefix}prefix_cache_evictions", "Pages evicted.", labels=["model_name", "tier"])
    evictions.add_metric([model, "ram"], now.evicted_pages)
    evictions.add_metric([model, "disk"], now.disk_evicted_pages)
    yield evictions
    yield from _tiers("pages", "Pages held.", (now.ram_pages, now.disk_pages), prefix, model)
    yield from _tiers("bytes", "Bytes held.", (now.ram_bytes, now.disk_bytes), prefix, model)
    for name, value in (("stores_in_flight", now.stores_in_flight), ("spill_queue", now.spill_queue)):
        gauge = GaugeMetricFamily(f"{prefix}prefix_cache_{name}", name.replace("_", " "), labels=["model_name"])
        gauge.add_metric([model], value)
        yield gauge


def _tiers(name: str, text: str, values: tuple[int, int], prefix: str, model: str) -> Iterator[Metric]:
    family = GaugeMetricFamily(f"{prefix}prefix_cache_{name}", text, labels=["model_name", "tier"])
    for tier, value in zip(("ram", "disk"), values, strict=True):
        family.add_metric([model, tier], value)
    yield family
