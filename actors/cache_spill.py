"""Pages on their way to disk: which, in what order, and what happens when the disk cannot keep up.

One page is written at a time: its KV stays in RAM meanwhile, so a bounded queue of ids is all that waits. A page goes
after the pages before it, so that the disk never holds one that cannot be reached.

Write-through offers every page once it is stored. Write-back waits until RAM is nearly full, and takes the pages that
RAM would give up next. Both bring the rest at a flush. What finds the queue full, the disk full or the disk failing is
dropped and counted.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal

import msgspec

from ..runtime.messages.cache_disk import CacheDiskMessage, DeletePages, WritePage
from ..runtime.messages.executor import ReadPage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..runtime.clock import Clock
    from ..runtime.messages.cache_store import PageRead, PageWritten
    from ..runtime.messages.executor import ExecutorMessage
    from ..runtime.prefix_page import Page
    from ..runtime.prefix_tree import PrefixTree

HIGH_SHARE = 0.75
"""Share of the RAM budget above which write-back begins to write."""
PAUSE_S = 10.0
"""After a fault the disk is left alone for so long."""
FILE_SLACK_BYTES = 16 << 10
"""More than a page's file is larger than the page."""
LOOKAHEAD_PAGES = 8

Mode = Literal["write-through", "write-back"]


class Spill:
    """Owned by the cache-store's core.

    Attributes:
        spilled, dropped, faults: pages written, not written, and writes that failed, so far.
        open: whether there is a disk tier that works.
    """

    def __init__(self, tree: PrefixTree, mode: Mode, bound: int, clock: Clock) -> None:
        self.to_executor: list[ExecutorMessage] = []
        self.to_disk: list[CacheDiskMessage] = []
        self.open = False
        self.spilled = self.dropped = self.faults = 0
        self._tree = tree
        self._mode = mode
        self._bound = bound
        self._clock = clock
        self._queue: deque[int] = deque()
        self._queued: set[int] = set()
        self._writing: Page | None = None
        self._state = False
        self._paused_until_s = float("-inf")

    @property
    def waiting(self) -> int:
        """Pages that wait or are being written."""
        return len(self._queue) + (self._writing is not None)

    @property
    def idle(self) -> bool:
        """True when nothing is to be done, or nothing can be."""
        return self._writing is None and (not self._queue or not self.open or self._paused)

    @property
    def _paused(self) -> bool:
        return self._clock.now() < self._paused_until_s

    def stored(self, pages: Iterable[int]) -> None:
        """New pages are in RAM."""
        if self.open and self._mode == "write-through":
            for page in pages:
                self._offer(page, self._bound)

    def flush(self) -> None:
        """Write all that the disk does not have, parents first, whatever the bound."""
        if not self.open:
            return
        dirty = [page for page in self._tree.all_pages() if page.in_ram and not page.clean]
        for page in sorted(dirty, key=lambda page: page.end):
            self._offer(page.page_id, len(dirty) + self._bound)

    def _offer(self, page: int, bound: int) -> None:
        if page in self._queued:
            return
        if len(self._queue) >= bound:
            self.dropped += 1
            return
        self._queue.append(page)
        self._queued.add(page)

    def pump(self) -> None:
        """Begin with the next page, if one may be written now."""
        if not self.open or self._writing is not None or self._paused:
            return
        if not self._queue and self._mode == "write-back":
            self._look_ahead()
        while self._queue and self._writing is None:
            page = self._next()
            if page is not None:
                self._begin(page)

    def _look_ahead(self) -> None:
        if self._tree.ram_bytes > self._tree.budget_bytes * HIGH_SHARE:
            for page in self._tree.next_to_go(LOOKAHEAD_PAGES):
                if not page.clean:
                    self._offer(page.page_id, self._bound)

    def _next(self) -> Page | None:
        """The page at the head of the queue, or one before it that the disk lacks."""
        page = self._tree.page(self._queue[0])
        if page is None or not page.in_ram or page.clean:
            self._queued.discard(self._queue.popleft())
            return None
        first = next(before for before in page.path() if not before.clean)
        if first is page:
            self._queued.discard(self._queue.popleft())
        return first

    def _begin(self, page: Page) -> None:
        self._tree.lease(-page.page_id, page.path())
        room = page.ram_bytes + len(page.key) + FILE_SLACK_BYTES
        if not self._tree.make_disk_room(room):
            self._tree.unlease(-page.page_id)
            self.dropped += 1
            self._skip_behind(page)
            if self._mode == "write-back":  # it would look at the same page each turn
                self._paused_until_s = self._clock.now() + PAUSE_S
            return
        self._writing, self._state = page, page.ram_state
        self.to_executor.append(ReadPage(page.page_id))

    def _skip_behind(self, page: Page) -> None:
        """What was to follow a page that cannot be written is not written either."""
        if self._queue:
            head = self._tree.page(self._queue[0])
            if head is not None and page in head.path():
                self._queued.discard(self._queue.popleft())
                self.dropped += 1

    def read(self, message: PageRead) -> None:
        """The page's bytes are here."""
        page = self._writing
        if page is None or page.page_id != message.page:
            return
        if message.blob is None or self._tree.page(page.page_id) is not page:
            self._finish(page)
            self.dropped += 1
            return
        self._state = message.blob.layout.state is not None
        record = msgspec.structs.replace(page.record(message.blob.nbytes), state=self._state)
        self.to_disk.append(WritePage(page.page_id, record, message.blob))

    def written(self, message: PageWritten) -> None:
        """The page is on disk, or is not."""
        page = self._writing
        if page is None or page.page_id != message.page:
            return
        self._finish(page)
        if message.error is not None:
            self.faults += 1
            self.dropped += 1
            self._paused_until_s = self._clock.now() + PAUSE_S
            return
        parent = page.parent
        reachable = self._tree.page(page.page_id) is page and parent is not None
        if not reachable or parent is None or not (parent.on_disk or parent.parent is None):
            self.to_disk.append(DeletePages((page.chain,)))
            return
        self.spilled += 1
        self._tree.written(page, message.bytes, state=self._state)
        self._tree.make_disk_room(0)

    def _finish(self, page: Page) -> None:
        self._writing = None
        self._tree.unlease(-page.page_id)
