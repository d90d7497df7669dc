"""One model of a pool: where it is between not loaded, loading, served, unloading and failed."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import anyio

from ..directory import ModelEntry
from ..errors import NotReady

if TYPE_CHECKING:
    from ..directory import ModelState
    from ..generation import ModelInfo
    from ..models.progress import Progress
    from ..peers import Peer
    from ..service import Service
    from .settings import PooledModel

FIRST_RETRY_S = 5.0
LAST_RETRY_S = 300.0
_FOLDERS = re.compile(r"(?<![\w/])~?/(?:[^\s/:,'\"]+/)+")


class Slot:
    """Owned by the pool, on the event loop's thread; `report` alone may be called from others.

    Attributes:
        model: its settings.
        peer: its engine among the others.
        state: see `ModelEntry`.
        service: what serves it; None unless "ready".
        info: what it is, once it has been loaded.
        users: leases held or waited for; while there is one the model is not unloaded.
        holds: it is in memory, or on its way there.
        used_s: when the last lease ended.
        reason: why it failed.
        retry_at_s: when a failed one may be loaded again.
        changed: set, and replaced, when the state changes.
        stop: ends the model that is served.
        scope: of the task that loads and keeps it; None before the first load.
    """

    def __init__(self, model: PooledModel, peer: Peer) -> None:
        self.model = model
        self.peer = peer
        self.state: ModelState = "idle"
        self.service: Service | None = None
        self.info: ModelInfo | None = None
        self.users = 0
        self.holds = False
        self.used_s = 0.0
        self.reason = ""
        self.retry_at_s = 0.0
        self.changed = asyncio.Event()
        self.stop = asyncio.Event()
        self.scope: anyio.CancelScope | None = None
        self._failures = 0
        self._dead: str | None = None
        self._progress: Progress | None = None

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.model.name

    @property
    def evictable(self) -> bool:
        """Whether it could be unloaded now."""
        return self.state == "ready" and not self.users and not self.model.pin

    def report(self, progress: Progress) -> None:
        """How far the load is; from any thread."""
        self._progress = progress

    def load(self) -> None:
        """A load begins."""
        self.stop, self.scope = asyncio.Event(), anyio.CancelScope()
        self._progress = self._dead = None
        self._move("loading")

    def loaded(self, service: Service, now_s: float) -> None:
        """It is served from now on."""
        self.service, self.info = service, service.model
        self._failures, self.reason, self.used_s, self._progress = 0, "", now_s, None
        self._move("ready")

    def unload(self, dead: str | None = None) -> None:
        """Nobody gets it any more; its task frees it. `dead` says why it counts as failed."""
        self.service, self._dead = None, dead
        self._move("unloading")
        self.stop.set()

    def gone(self, now_s: float) -> None:
        """It is freed."""
        if self._dead is not None:
            self.failed(self._dead, now_s)
            return
        self.service = None
        self._move("idle")

    def failed(self, reason: str, now_s: float) -> None:
        """It could not be loaded, or has died; it may be tried again after a while that doubles each time."""
        self._failures += 1
        self.service, self.reason = None, public(reason)
        self.retry_at_s = now_s + min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** (self._failures - 1))
        self._move("failed")

    def wake(self) -> None:
        """Have those that wait look again."""
        self.changed.set()
        self.changed = asyncio.Event()

    def error(self, now_s: float) -> NotReady:
        """What requests get while it has failed."""
        retry_s = max(1.0, self.retry_at_s - now_s)
        text = f"the model {self.name!r} cannot be served: {self.reason}; it is tried again in {retry_s:.0f} s at most"
        return NotReady(text, retry_after_s=retry_s, code="model_failed")

    @property
    def progress(self) -> float | None:
        """Share of the stage of a load that is done, if known."""
        progress = self._progress
        if self.state != "loading" or progress is None or not progress.total:
            return None
        return min(1.0, progress.done / progress.total)

    def entry(self) -> ModelEntry:
        """What the world is told."""
        return ModelEntry(
            name=self.name,
            aliases=self.model.aliases,
            state=self.state,
            detail=self._detail(),
            progress=self.progress,
            info=self.info,
            pinned=self.model.pin,
            users=self.users,
        )

    def _detail(self) -> str:
        if self.state == "failed":
            return self.reason
        if self.state == "loading" and self._progress is not None:
            share = self.progress
            return self._progress.stage if share is None else f"{self._progress.stage}: {share:.0%}"
        readiness = None if self.service is None else self.service.readiness()
        return "" if readiness is None or readiness.ready else f"{readiness.reason} {readiness.detail}".rstrip()

    def _move(self, state: ModelState) -> None:
        self.state = state
        self.wake()


def public(text: str) -> str:
    """A fault's text without the folders of this machine."""
    return _FOLDERS.sub("", text)
