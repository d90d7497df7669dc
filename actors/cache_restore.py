"""Pages on their way back from disk for rows that wait for them, each until its deadline.

A few pages are under way at a time: read on the I/O thread, made into arrays on the MLX thread between two steps. A row
that waits for a page another row has asked for waits for the same one. What comes late still lands in RAM.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from ..runtime.messages.cache_disk import CacheDiskMessage, FetchPage
from ..runtime.messages.executor import LoadPage

if TYPE_CHECKING:
    from ..runtime.clock import Clock
    from ..runtime.messages.cache_store import Match, PageFetched, PageLoaded
    from ..runtime.messages.executor import ExecutorMessage
    from ..runtime.prefix_page import Page
    from ..runtime.prefix_tree import PrefixTree

PAGES_UNDER_WAY = 3


class Waiting(NamedTuple):
    """A row that waits: what it asked, since when, and until when."""

    match: Match
    since_s: float
    deadline_s: float


class Restore:
    """Owned by the cache-store's core.

    Attributes:
        restored: pages brought back; lost: pages that could not be; both so far.
        waited_s: seconds that rows waited.
        timeouts: rows whose deadline passed.
    """

    def __init__(self, tree: PrefixTree, timeout_s: float, clock: Clock) -> None:
        self.to_executor: list[ExecutorMessage] = []
        self.to_disk: list[CacheDiskMessage] = []
        self.restored = self.lost = self.timeouts = 0
        self.waited_s = 0.0
        self._tree = tree
        self._timeout_s = timeout_s
        self._clock = clock
        self._rows: dict[int, Waiting] = {}
        self._wanted: deque[int] = deque()
        self._under_way: set[int] = set()

    @property
    def idle(self) -> bool:
        """True when no row waits and no page is under way."""
        return not (self._rows or self._wanted or self._under_way)

    @property
    def waiting(self) -> int:
        """Rows that wait."""
        return len(self._rows)

    def begin(self, match: Match, cold: list[Page]) -> None:
        """`match.row` has leased pages, of which these must come from disk."""
        now_s = self._clock.now()
        self._rows[match.row] = Waiting(match, now_s, now_s + self._timeout_s)
        asked = set(self._wanted) | self._under_way
        self._wanted.extend(page.page_id for page in cold if page.page_id not in asked)
        self._pump()

    def fetched(self, message: PageFetched) -> None:
        """A page's bytes are here, or are not to be had: then it is forgotten, and what is behind it."""
        page = self._tree.page(message.page)
        if message.blob is None:
            self._under_way.discard(message.page)
            if page is not None and page.in_ram:
                self._tree.lose_disk(page)
            elif page is not None:
                self.lost += self._tree.forget((page.page_id,))
        elif page is None or page.in_ram or not self._tree.restored(page):
            self._under_way.discard(message.page)  # it is gone, there already, or finds no room
        else:
            self.to_executor.append(LoadPage(message.page, message.blob))
        self._pump()

    def loaded(self, message: PageLoaded) -> None:
        """A page has become arrays, or could not."""
        self._under_way.discard(message.page)
        if message.error is None:
            self.restored += 1
        else:
            self.lost += self._tree.forget((message.page,))
        self._pump()

    def take_done(self) -> list[Match]:
        """Rows that need wait no longer: all is in RAM, nothing more will come, or time is over."""
        now_s = self._clock.now()
        coming = set(self._wanted) | self._under_way
        done = []
        for row, waiting in list(self._rows.items()):
            late = now_s >= waiting.deadline_s
            if not late and any(page.page_id in coming for page in self._tree.cold(row)):
                continue
            self.timeouts += late
            self.waited_s += now_s - waiting.since_s
            del self._rows[row]
            done.append(waiting.match)
        return done

    def drop(self, row: int) -> None:
        """The row does not wait any more."""
        self._rows.pop(row, None)

    def _pump(self) -> None:
        while self._wanted and len(self._under_way) < PAGES_UNDER_WAY:
            page = self._tree.page(self._wanted.popleft())
            if page is not None and not page.in_ram:
                self._under_way.add(page.page_id)
                self.to_disk.append(FetchPage(page.page_id, page.chain))
