"""The pool: several models in one process, each with a runtime and an MLX thread of its own.

A model is loaded when a request names it and unloaded when its time to live is over or another needs the place; one
that somebody holds, or waits for, is never unloaded, so a request that meets an unload waits for the next load. Loads
run side by side in tasks of their own: one that hangs or fails is its own requests' trouble only. A failed model is
tried again by a request that comes after its back-off.

Owned by the event loop it was entered on.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import anyio

from ..clock import MonotonicClock
from ..directory import DirectoryStatus, ModelStatus
from ..errors import NotReady, RequestCancelled, TroupeError, UnknownModel
from ..peers import Peers
from ..service import Readiness
from .choice import expired, least_used
from .exposition import merged, pool_metrics
from .settings import PoolSettings, look_up
from .slot import Slot
from .totals import total

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from types import TracebackType

    from anyio.abc import TaskGroup

    from ..clock import Clock
    from ..config import RuntimeConfig
    from ..directory import ModelEntry
    from ..models.progress import Report
    from ..peers import Peer
    from ..service import Service
    from .settings import PooledModel

logger = logging.getLogger(__name__)

TICK_S = 1.0
FULL_RETRY_S = 5.0


class LoadingService(Protocol):
    """A service whose block loads and unloads its model, as `Runtime` is."""

    async def __aenter__(self) -> Service:
        """Load."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        """Unload."""
        ...


class _Unwanted(Exception):
    """Nobody waits any more for a model that waits for its place."""


class _Wait:
    """A request that waits for its model."""

    def __init__(self, scope: anyio.CancelScope) -> None:
        self.scope = scope
        self.cancelled = False


class ModelPool:
    """See the module; a `ModelDirectory`.

    Args:
        models: the first is the default one. Those pinned are loaded at the start; the first if none is.
        settings: of the pool.
        open_service: makes the runtime of a model; tests bring a fake one.
        clock: for times to live and back-offs.
        tick_s: how often these are looked at; None leaves that to calls of `tick`.

    Raises:
        ValueError: two models answer to one name, or there is none.
    """

    def __init__(
        self,
        models: Sequence[PooledModel],
        settings: PoolSettings | None = None,
        *,
        open_service: Callable[[RuntimeConfig, Report, Peer], LoadingService] | None = None,
        clock: Clock | None = None,
        tick_s: float | None = TICK_S,
    ) -> None:
        if not models:
            raise ValueError("a pool needs a model")
        self._settings = settings or PoolSettings()
        self._open = open_service or _open_runtime
        self._clock: Clock = clock or MonotonicClock()
        self._tick_s = tick_s
        self._peers = Peers(self)
        self._slots = [Slot(model, self._peers.join(model.name)) for model in models]
        self._names = {name: self._slots[place] for name, place in look_up(models).items()}
        self._group: TaskGroup | None = None
        self._ticks: anyio.CancelScope | None = None
        self._waits: dict[str, _Wait] = {}
        self._waiting = 0
        self._draining = False
        self._begun = False
        self._freed = asyncio.Event()
        self._loads = self._unloads = self._failures = 0

    # --- life -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> ModelPool:
        group = self._group = anyio.create_task_group()
        await group.__aenter__()
        if self._tick_s is not None:
            group.start_soon(self._keep_ticking, self._tick_s, name="pool ticks")
        pinned = [slot for slot in self._slots if slot.model.pin]
        for slot in pinned or self._slots[:1]:
            self._begin(slot)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._draining = True
        if self._ticks is not None:
            self._ticks.cancel()
        self._stop_loads()
        for slot in self._slots:
            if slot.state == "ready":
                slot.unload()
        group, self._group = self._group, None
        if group is None:
            return
        if error is not None:
            group.cancel_scope.cancel()
        await group.__aexit__(None, None, None)

    async def drain(self, timeout_s: float) -> None:
        """See `ModelDirectory.drain`."""
        self._draining = True
        self._stop_loads()
        async with anyio.create_task_group() as group:
            for slot in self._slots:
                if slot.service is not None:
                    group.start_soon(slot.service.drain, timeout_s)

    def _stop_loads(self) -> None:
        for slot in self._slots:
            if slot.state == "loading" and slot.scope is not None:
                slot.scope.cancel()
            slot.wake()

    async def _keep_ticking(self, interval_s: float) -> None:
        with anyio.CancelScope() as self._ticks:
            while True:
                await anyio.sleep(interval_s)
                self.tick()

    def tick(self) -> None:
        """Unload what nobody has used for its time to live, and what has died."""
        for slot in self._slots:
            self._bury(slot)
        for slot in expired(self._slots, self._settings.model_ttl_s, self._clock.now()):
            logger.info("%s is unloaded: nobody has used it for a while", slot.name)
            slot.unload()

    # --- requests -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, name: str, request_ids: Sequence[str] = ()) -> AsyncIterator[Service]:
        """See `ModelDirectory.lease`."""
        slot = self._slot(name)
        slot.users += 1
        try:
            yield await self._service(slot, request_ids)
        finally:
            slot.users -= 1
            slot.used_s = self._clock.now()
            if not slot.users:
                self._tell_freed()

    def _slot(self, name: str) -> Slot:
        slot = self._names.get(name)
        if slot is None:
            raise UnknownModel(name, [slot.name for slot in self._slots])
        return slot

    async def _service(self, slot: Slot, request_ids: Sequence[str]) -> Service:
        self._bury(slot)
        if slot.service is not None:
            return slot.service
        if self._waiting >= self._settings.max_model_waits:
            raise NotReady(f"{self._waiting} requests wait for models already; try later", retry_after_s=FULL_RETRY_S)
        self._waiting += 1
        wait = _Wait(anyio.CancelScope())
        self._waits |= dict.fromkeys(request_ids, wait)
        try:
            with wait.scope, anyio.move_on_after(self._settings.model_wait_s):
                return await self._loaded(slot)
        finally:
            self._waiting -= 1
            for request_id in request_ids:
                self._waits.pop(request_id, None)
        if wait.cancelled:
            raise RequestCancelled(f"cancelled while {slot.name!r} was loaded")
        waited_s = self._settings.model_wait_s
        raise NotReady(f"{slot.name!r} is not loaded after {waited_s:.0f} s; try later", retry_after_s=FULL_RETRY_S)

    async def _loaded(self, slot: Slot) -> Service:
        """Have the model loaded if need be, and wait until it is, or cannot be."""
        while slot.service is None:
            if self._draining:
                raise NotReady("the server is shutting down; try again later", code="shutting_down")
            now_s = self._clock.now()
            if slot.state == "failed" and now_s < slot.retry_at_s:
                raise slot.error(now_s)
            if slot.state in ("idle", "failed"):
                self._begin(slot)
            await slot.changed.wait()
        return slot.service

    def cancel(self, request_id: str) -> None:
        """See `ModelDirectory.cancel`."""
        wait = self._waits.get(request_id)
        if wait is not None:
            wait.cancelled = True
            wait.scope.cancel()
        for slot in self._slots:
            if slot.service is not None:
                slot.service.cancel(request_id)

    # --- loading --------------------------------------------------------------------------------------------------

    def _begin(self, slot: Slot) -> None:
        if self._group is None:
            raise NotReady("the server is not running")
        slot.load()
        self._group.start_soon(self._keep, slot, name=f"model {slot.name}")

    async def _keep(self, slot: Slot) -> None:
        """Load a model, keep it until it is told to stop, and free it."""
        began_s = self._clock.now()
        try:
            assert slot.scope is not None
            with slot.scope:
                await self._make_place(slot)
                async with self._open(slot.model.config, slot.report, slot.peer) as service:
                    slot.loaded(service, self._clock.now())
                    self._loads += 1
                    logger.info("%s is loaded after %.1f s", slot.name, slot.used_s - began_s)
                    self._tell_freed()
                    await slot.stop.wait()
        except _Unwanted:
            logger.info("%s is not loaded: nobody waits for it any more", slot.name)
        except Exception as error:
            self._load_failed(slot, error)
        finally:
            slot.holds = False
            self._unloads += slot.state == "unloading"
            if slot.state in ("loading", "ready", "unloading"):
                slot.gone(self._clock.now())
            self._begun = True
            self._tell_freed()

    def _load_failed(self, slot: Slot, error: Exception) -> None:
        if slot.state != "loading":
            logger.error("%s could not be ended in order", slot.name, exc_info=error)
            return
        self._failures += 1
        expected = isinstance(error, TroupeError)
        logger.error("%s could not be loaded: %s", slot.name, error, exc_info=None if expected else error)
        slot.failed(str(error) or type(error).__name__, self._clock.now())

    async def _make_place(self, slot: Slot) -> None:
        """Wait until fewer models are loaded than may be, unloading those that nobody uses."""
        most = self._settings.max_loaded_models
        while most is not None and (excess := sum(other.holds for other in self._slots) + 1 - most) > 0:
            if excess > sum(other.state == "unloading" for other in self._slots) and self._evict(slot):
                continue
            await self._wait_for_place(slot)
        slot.holds = True

    async def _wait_for_place(self, slot: Slot) -> None:
        await self._freed.wait()
        if not slot.users and not slot.model.pin:
            raise _Unwanted

    async def make_room(self, peer: Peer, size_bytes: int) -> None:
        """See `Landlord.make_room`; alone, a model is loaded however large it is."""
        slot = self._slot_of(peer)
        while (spare_bytes := self._peers.spare_bytes(peer)) is not None and spare_bytes < size_bytes:
            others = [other for other in self._slots if other.holds and other is not slot]
            if not others:
                return
            if spare_bytes + self._leaving_bytes() < size_bytes and self._evict(slot):
                continue
            if all(other.model.pin for other in others):
                raise NotReady(
                    f"it needs about {size_bytes >> 20} MiB of memory, and pinned models leave "
                    f"{max(0, spare_bytes) >> 20} MiB: raise the limit, or unpin one",
                    code="memory_limit_exceeded",
                )
            await self._wait_for_place(slot)

    def evict_for(self, peer: Peer, size_bytes: int) -> bool:
        """See `Landlord.evict_for`."""
        if self._leaving_bytes() < size_bytes:
            self._evict(self._slot_of(peer))
        return self._leaving_bytes() > 0

    def _leaving_bytes(self) -> int:
        return sum(slot.peer.claim_bytes for slot in self._slots if slot.state == "unloading")

    def _slot_of(self, peer: Peer) -> Slot:
        return next(slot for slot in self._slots if slot.peer is peer)

    def _evict(self, slot: Slot) -> bool:
        """Begin to unload the model used longest ago; False when all are in use."""
        victim = least_used(self._slots, slot)
        if victim is None:
            return False
        logger.info("%s is unloaded to make place for %s", victim.name, slot.name)
        victim.unload()
        return True

    def _tell_freed(self) -> None:
        self._freed.set()
        self._freed = asyncio.Event()

    def _bury(self, slot: Slot) -> None:
        """A runtime that has failed for good is freed; the model may be loaded anew after a while."""
        if slot.service is None:
            return
        readiness = slot.service.readiness()
        if readiness.reason == "failed":
            logger.error("%s has failed for good: %s", slot.name, readiness.detail)
            self._failures += 1
            slot.unload(dead=readiness.detail or "its engine failed")

    # --- the rest -------------------------------------------------------------------------------------------------

    def entries(self) -> list[ModelEntry]:
        """See `ModelDirectory.entries`."""
        return [slot.entry() for slot in self._slots]

    def entry(self, name: str) -> ModelEntry:
        """See `ModelDirectory.entry`."""
        return self._slot(name).entry()

    def readiness(self) -> Readiness:
        """Ready when some model is served, or would be for the asking; the detail tells of those that are not."""
        if self._draining:
            return Readiness(False, "draining")
        entries = self.entries()
        detail = "; ".join(f"{one.name}: {one.detail or one.state}" for one in entries if _is_noteworthy(one))
        if any(slot.service is not None and slot.service.readiness().ready for slot in self._slots):
            return Readiness(True, "", detail)
        if not self._begun or any(one.state == "loading" for one in entries):
            return Readiness(False, "loading", detail)
        if any(one.state in ("idle", "unloading") for one in entries):
            return Readiness(True, "", detail)
        return Readiness(False, "failed", detail)

    def accepts(self) -> Readiness:
        """All but a pool that drains looks at requests: each learns how its own model does."""
        return Readiness(False, "draining") if self._draining else Readiness(True)

    async def status(self) -> DirectoryStatus:
        """See `ModelDirectory.status`."""
        models = [
            ModelStatus(entry=slot.entry(), status=None if slot.service is None else await slot.service.status())
            for slot in self._slots
        ]
        found = [model.status for model in models if model.status is not None]
        return DirectoryStatus(
            readiness=self.readiness(),
            models=tuple(models),
            loads=self._loads,
            unloads=self._unloads,
            failures=self._failures,
            model=", ".join(status.model for status in found),
            statistics=total([status.statistics for status in found]),
            memory=next((status.memory for status in found if status.memory is not None), None),
        )

    async def metrics(self) -> bytes:
        """See `ModelDirectory.metrics`."""
        own = pool_metrics(await self.status(), self._waiting)
        return merged([own, *[await slot.service.metrics() for slot in self._slots if slot.service is not None]])


def _is_noteworthy(entry: ModelEntry) -> bool:
    return bool(entry.detail) or entry.state in ("loading", "failed")


def _open_runtime(config: RuntimeConfig, progress: Report, peer: Peer) -> LoadingService:
    from ..facade import Runtime

    return Runtime(config, progress=progress, peer=peer)
