"""A pool of fake services, each of which loads when its test says so."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from mlx_troupe.runtime.clock import ManualClock
from mlx_troupe.runtime.config import RuntimeConfig
from mlx_troupe.runtime.pool.pool import ModelPool
from mlx_troupe.runtime.pool.settings import PooledModel, PoolSettings
from tests.api.fake_service import FakeService


class Opened:
    """The services that a pool has opened, by model, the newest last.

    Attributes:
        at_once: models whose services load as soon as they are opened.
        errors: what a model's next loads raise, in order.
    """

    def __init__(self, *at_once: str) -> None:
        self.at_once = set(at_once)
        self.errors: dict[str, list[Exception]] = {}
        self.services: dict[str, list[FakeService]] = {}
        self.reports: dict[str, Callable[[Any], None]] = {}

    def __call__(self, config: RuntimeConfig, report: Callable[[Any], None], *_: Any) -> FakeService:
        name = config.served_name
        service = FakeService(loaded=False)
        self.reports[name] = report
        self.services.setdefault(name, []).append(service)
        if self.errors.get(name):
            service.load_error = self.errors[name].pop(0)
        if name in self.at_once or service.load_error is not None:
            service.may_load.set()
        return service

    def __getitem__(self, name: str) -> FakeService:
        return self.services[name][-1]

    def count(self, name: str) -> int:
        return len(self.services.get(name, []))


def models(*names: str, **fields: Any) -> list[PooledModel]:
    return [
        PooledModel(name=name, config=RuntimeConfig(model=f"/m/{name}", served_name=name), **fields) for name in names
    ]


@asynccontextmanager
async def pool_of(
    opened: Opened, named: list[PooledModel], clock: ManualClock | None = None, **settings: Any
) -> AsyncIterator[ModelPool]:
    """A pool that ticks only when told to; nothing is left loaded afterwards."""
    pool = ModelPool(named, PoolSettings(**settings), open_service=opened, clock=clock or ManualClock(), tick_s=None)
    async with pool:
        yield pool
    for services in opened.services.values():
        assert all(service.exited or service.load_error or not service._loaded for service in services)
    assert all(entry.state in ("idle", "failed") and not entry.users for entry in pool.entries())
