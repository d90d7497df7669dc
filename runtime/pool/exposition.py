"""Several models' metrics as one Prometheus exposition, in which each family may stand only once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.metrics_core import Metric

    from ..directory import DirectoryStatus

PREFIX = "mlx_troupe_"
STATES = ("ready", "loading", "idle", "unloading", "failed")


def merged(texts: Iterable[bytes]) -> bytes:
    """The samples of all texts, those of one family together under its first header."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for text in texts:
        family = b""
        for line in text.splitlines():
            if line.startswith(b"# "):
                _, kind, family = line.split(b" ", 3)[:3]
                head = heads.setdefault(family, [])
                samples.setdefault(family, [])
                if not any(other.startswith(b"# %s " % kind) for other in head):
                    head.append(line)
            elif line:
                samples.setdefault(family, []).append(line)
    lines = [line for family, found in samples.items() for line in (*heads.get(family, ()), *found)]
    return b"\n".join(lines) + b"\n" if lines else b""


class _PoolFamilies(Collector):
    def __init__(self, status: DirectoryStatus, waiting: int) -> None:
        self._status = status
        self._waiting = waiting

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        status = self._status
        state = GaugeMetricFamily(
            PREFIX + "model_state", "1 for the state a model is in.", labels=["model_name", "state"]
        )
        users = GaugeMetricFamily(PREFIX + "model_users", "Requests that hold a model, or wait.", labels=["model_name"])
        for model in status.models:
            users.add_metric([model.entry.name], model.entry.users)
            for name in STATES:
                state.add_metric([model.entry.name, name], float(model.entry.state == name))
        yield from (state, users)
        yield GaugeMetricFamily(PREFIX + "model_waits", "Requests that wait for a model.", value=self._waiting)
        yield CounterMetricFamily(PREFIX + "model_loads", "Models loaded.", value=status.loads)
        yield CounterMetricFamily(PREFIX + "model_unloads", "Models unloaded.", value=status.unloads)
        yield CounterMetricFamily(PREFIX + "model_load_failures", "Loads that failed.", value=status.failures)


def pool_metrics(status: DirectoryStatus, waiting: int) -> bytes:
    """The pool's own families."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_PoolFamilies(status, waiting))
    return generate_latest(registry)
