"""The cache-store actor: the message loop around `CacheStoreCore`, and its line to the disk's thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import anyio

from ..runtime.actor import Actor
from ..runtime.messages.cache_store import (
    CacheStoreMessage,
    DiskOpened,
    Flush,
    Match,
    PageFetched,
    PageLoaded,
    PageRead,
    PagesAdopted,
    PagesLost,
    PageWritten,
    Reclaim,
    SetBudget,
    Store,
    Tick,
    Unlease,
)
from .delivery import deliver

if TYPE_CHECKING:
    from ..runtime.actor import Ref, Reply
    from ..runtime.clock import Clock
    from ..runtime.errors import ActorDied
    from ..runtime.messages.admission import AdmissionMessage
    from ..runtime.messages.executor import ExecutorMessage
    from ..runtime.messages.prefill import PrefillMessage
    from .cache_core import CacheStoreCore
    from .cache_disk import CacheDisk


class CacheStoreActor(Actor[CacheStoreMessage]):
    """Owns the prefix tree.

    Args:
        disk: the disk tier; None is RAM only.

    Attributes:
        opened: set once the disk's pages are known, or there is no disk.
    """

    admission: Ref[AdmissionMessage]
    prefill: Ref[PrefillMessage]
    executor: Ref[ExecutorMessage]

    def __init__(self, core: CacheStoreCore, *, inbox: int, clock: Clock, disk: CacheDisk | None = None) -> None:
        super().__init__("cache-store", inbox=inbox, clock=clock)
        self.core = core
        self.opened = anyio.Event()
        self._disk = disk
        self._flushes: list[Reply[None]] = []

    async def run(self) -> None:
        """Serve until cancelled; the disk is opened meanwhile."""
        if self._disk is None:
            self.opened.set()
        else:
            self._disk.start(self.ref)
        await super().run()

    def handle(self, message: CacheStoreMessage) -> None:
        """See messages/cache_store.py."""
        core = self.core
        match message:
            case Match():
                core.match(message)
            case Store():
                core.store(message)
            case Unlease():
                core.unlease(message.row)
            case PagesAdopted():
                core.adopted(message.store)
            case PagesLost():
                core.lost(message.pages)
            case PageRead() | PageWritten() | PageFetched() | PageLoaded() | DiskOpened():
                self._disk_news(message)
            case Reclaim() | SetBudget():
                limit = core.reclaim if isinstance(message, Reclaim) else core.set_budget
                limit(message.bytes)
            case Flush():
                core.spill.flush()
                self._flushes.append(message.reply)
            case Tick():
                pass  # deadlines are looked at each turn
            case _:
                assert_never(message)

    def _disk_news(self, message: PageRead | PageWritten | PageFetched | PageLoaded | DiskOpened) -> None:
        core = self.core
        match message:
            case PageRead():
                core.page_read(message)
            case PageWritten():
                core.page_written(message)
            case PageFetched():
                core.page_fetched(message)
            case PageLoaded():
                core.page_loaded(message)
            case DiskOpened():
                core.disk_opened(message)
                self.opened.set()
            case _:
                assert_never(message)

    def settle(self) -> None:
        """Send the engine its orders before prefill can act on them."""
        core = self.core
        core.settle()
        deliver(core.to_executor, self.executor)
        deliver(core.to_prefill, self.prefill)
        deliver(core.to_admission, self.admission)
        if self._disk is not None:
            for order in core.to_disk:
                self._disk.tell(order)
        core.to_disk.clear()
        if self._flushes and core.spill.idle:
            if self._disk is not None:
                self._disk.tell(core.last_uses())
            for reply in self._flushes:
                reply.send(None)
            self._flushes.clear()

    def on_death(self, error: ActorDied) -> None:
        """Nobody waits for a flush any more."""
        for reply in self._flushes:
            reply.fail(error)
        self._flushes.clear()
