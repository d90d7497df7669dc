"""The cache-store's line to its disk tier: orders go to a thread of their own, answers come back as messages."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from typing import TYPE_CHECKING, Protocol, assert_never

from ..runtime.actor import InboxFull
from ..runtime.disk import DiskUnusable
from ..runtime.errors import ActorDied
from ..runtime.messages.cache_disk import CacheDiskMessage, DeletePages, FetchPage, TouchPages, WritePage
from ..runtime.messages.cache_store import CacheStoreMessage, DiskOpened, PageFetched, PageWritten

if TYPE_CHECKING:
    from ..runtime.actor import Ref
    from ..runtime.disk import DiskTier
    from .executor import JobThread

logger = logging.getLogger(__name__)


class CacheDisk(Protocol):
    """What the cache-store needs of a disk."""

    def start(self, cache_store: Ref[CacheStoreMessage]) -> None:
        """Open the tier; DiskOpened follows."""
        ...

    def tell(self, order: CacheDiskMessage) -> None:
        """Do this after what was told before."""
        ...


class ThreadedDisk:
    """A disk tier on a thread. `start` and `tell` belong to the loop; methods marked "I/O thread" run there.

    Args:
        thread: runs jobs in order; its owner ends it, after `close`.
    """

    def __init__(self, tier: DiskTier, thread: JobThread) -> None:
        self._tier = tier
        self._thread = thread
        self._open = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cache_store: Ref[CacheStoreMessage] | None = None

    def start(self, cache_store: Ref[CacheStoreMessage]) -> None:
        """See `CacheDisk.start`."""
        self._loop = asyncio.get_running_loop()
        self._cache_store = cache_store
        self._thread.submit(self._begin)

    def tell(self, order: CacheDiskMessage) -> None:
        """See `CacheDisk.tell`."""
        self._thread.submit(lambda: self._do(order))

    def close(self) -> None:
        """Let go of the folder, after all that was told. Any thread but the I/O thread may wait for that."""
        self._thread.submit(self._end)

    def _begin(self) -> None:
        """I/O thread."""
        try:
            records, budget = self._tier.open()
        except DiskUnusable as error:
            logger.warning("the prefix cache has no disk: %s", error)
            self._post(DiskOpened((), 0, str(error)))
            return
        self._open = True
        self._post(DiskOpened(tuple(records), budget))

    def _do(self, order: CacheDiskMessage) -> None:
        """I/O thread."""
        match order:
            case WritePage():
                self._post(self._write(order))
            case FetchPage():
                self._post(PageFetched(order.page, self._tier.fetch(order.chain) if self._open else None))
            case DeletePages():
                self._tier.delete(order.chains)
            case TouchPages():
                self._tier.touch(order.used)
            case _:
                assert_never(order)

    def _write(self, order: WritePage) -> PageWritten:
        try:
            return PageWritten(order.page, self._tier.write(order.record, order.blob))
        except (OSError, sqlite3.Error) as error:
            logger.warning("the prefix cache could not write to disk: %s", error)
            return PageWritten(order.page, 0, str(error))

    def _end(self) -> None:
        """I/O thread."""
        self._open = False
        self._tier.close()

    def _post(self, message: CacheStoreMessage) -> None:
        """I/O thread."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        try:
            loop.call_soon_threadsafe(self._tell, message)
        except RuntimeError:  # the loop closed in between
            logger.debug("the disk's answer found the loop closed")

    def _tell(self, message: CacheStoreMessage) -> None:
        assert self._cache_store is not None
        try:
            self._cache_store.tell(message)
        except ActorDied:
            logger.debug("the disk's answer came after the end")
        except InboxFull:  # nothing may be lost: once more when the cache-store has had its turn
            asyncio.get_running_loop().call_soon(self._tell, message)
