"""What the API asks of whoever serves models: which there are, and one of them for the time of a request.

A `Service` is one served model; a `ModelDirectory` finds it by the name a request brings. `SingleModel` is the
directory of one service; `pool.ModelPool` has several that come and go. Names are looked up, never read as paths.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import msgspec

from .errors import UnknownModel
from .generation import ModelInfo
from .service import MemoryStatus, Readiness, Statistics, Status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from .service import Service

DEFAULT_MODEL_NAMES = ("", "default")
"""What a client sends that does not mind which model answers: the first."""

ModelState = Literal["ready", "loading", "idle", "unloading", "failed"]


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a directory.

    Attributes:
        name: the name clients use; `aliases` are others that the operator made public.
        state: "ready" is served now, "idle" is loaded when asked for, "failed" could not be, and is tried again later.
        detail: why, or how far, in words.
        progress: share of a load that is done, 0 to 1; None while unknown or nothing loads.
        info: what the model is; None until it has been loaded once.
        pinned: never unloaded.
        users: requests that hold it, or wait for it.
    """

    name: str
    aliases: tuple[str, ...] = ()
    state: ModelState = "ready"
    detail: str = ""
    progress: float | None = None
    info: ModelInfo | None = None
    pinned: bool = False
    users: int = 0


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One model of several, for an operator; `status` is None while it is not loaded."""

    entry: ModelEntry
    status: Status | None


class DirectoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All models of a directory, for an operator.

    Attributes:
        readiness: of the directory.
        models: in the order they were named.
        loads, unloads, failures: counted since the start.
        model, statistics, memory: of all that are loaded together, as a single model's `Status` has them.
    """

    readiness: Readiness
    models: tuple[ModelStatus, ...]
    model: str
    statistics: Statistics
    memory: MemoryStatus | None
    loads: int = 0
    unloads: int = 0
    failures: int = 0


@runtime_checkable
class ModelDirectory(Protocol):
    """The models of a server. All methods run on the event loop."""

    def entries(self) -> Sequence[ModelEntry]:
        """All models, the default first. Raises NotReady while that cannot be known."""
        ...

    def entry(self, name: str) -> ModelEntry:
        """The model that a request names. Raises UnknownModel, NotReady."""
        ...

    def lease(self, name: str, request_ids: Sequence[str] = ()) -> AbstractAsyncContextManager[Service]:
        """The named model's service, which stays loaded while the block runs; entering may load it first.

        Entering raises UnknownModel, NotReady when the model cannot be served now, and RequestCancelled when `cancel`
        named one of `request_ids` meanwhile.
        """
        ...

    def readiness(self) -> Readiness:
        """Whether new requests are served, for a load balancer."""
        ...

    def accepts(self) -> Readiness:
        """Whether new requests are looked at, which those are that will wait for a load."""
        ...

    async def status(self) -> Status | DirectoryStatus:
        """All of it for an operator; cheap."""
        ...

    async def metrics(self) -> bytes:
        """Prometheus exposition text of all that is served."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request, whichever model has it; unknown ids are ignored."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait for running ones up to `timeout_s`, end the rest with an error event."""
        ...


class SingleModel:
    """The directory of one service, which is loaded and unloaded by others."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def entries(self) -> tuple[ModelEntry, ...]:
        """See `ModelDirectory.entries`."""
        info = self._service.model
        return (ModelEntry(name=info.name, info=info),)

    def entry(self, name: str) -> ModelEntry:
        """See `ModelDirectory.entry`."""
        (found,) = self.entries()
        if name not in (*DEFAULT_MODEL_NAMES, found.name, *self._service.model.aliases):
            raise UnknownModel(name, [found.name])
        return found

    @asynccontextmanager
    async def lease(self, name: str, request_ids: Sequence[str] = ()) -> AsyncIterator[Service]:
        """See `ModelDirectory.lease`; never waits."""
        self.entry(name)
        yield self._service

    def readiness(self) -> Readiness:
        """See `ModelDirectory.readiness`."""
        return self._service.readiness()

    def accepts(self) -> Readiness:
        """A stalled runtime still takes requests; `readiness` is what sends them elsewhere."""
        readiness = self._service.readiness()
        return Readiness(True) if readiness.reason == "stalled" else readiness

    async def status(self) -> Status:
        """See `ModelDirectory.status`."""
        return await self._service.status()

    async def metrics(self) -> bytes:
        """See `ModelDirectory.metrics`."""
        return await self._service.metrics()

    def cancel(self, request_id: str) -> None:
        """See `ModelDirectory.cancel`."""
        self._service.cancel(request_id)

    async def drain(self, timeout_s: float) -> None:
        """See `ModelDirectory.drain`."""
        await self._service.drain(timeout_s)


def directory_of(served: Service | ModelDirectory) -> ModelDirectory:
    """The directory itself, or one of a single service."""
    return served if isinstance(served, ModelDirectory) else SingleModel(served)
