"""Reads a Prometheus exposition: plain gauges and counters by name, their labels summed."""

from __future__ import annotations

import math
from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

SKIPPED_SUFFIXES = ("_bucket", "_created")


def parse_metrics(text: str) -> dict[str, float]:
    """Values by sample name, summed over labels; {} for what is no exposition."""
    totals: dict[str, float] = defaultdict(float)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.endswith(SKIPPED_SUFFIXES) and math.isfinite(sample.value):
                    totals[sample.name] += sample.value
    except (ValueError, KeyError, IndexError):
        return {}
    return dict(totals)
