"""The cache-store: which prefixes are kept, in RAM, as whole pages of the engine's KV.

The core turns matches, stores and losses into decisions of the prefix tree; the actor tells the executor which pages to
name and which to free. Orders reach the engine's thread in the order they are given, so a page is named before any
chunk can ask for it, and freed only after the last chunk that does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from ..runtime.actor import Actor
from ..runtime.messages.cache_store import (
    CacheStoreMessage,
    Match,
    PagesLost,
    Reclaim,
    Store,
    Unlease,
)
from ..runtime.messages.executor import NO_PAGE, AdoptPages, DropPages
from ..runtime.messages.prefill import Matched
from ..runtime.prefix_tree import PrefixTree
from .delivery import deliver

if TYPE_CHECKING:
    from ..runtime.actor import Ref
    from ..runtime.clock import Clock
    from ..runtime.messages.executor import ExecutorMessage
    from ..runtime.messages.prefill import PrefillMessage


class CacheStoreCore:
    """Owned by the cache-store actor.

    Args:
        page_tokens: tokens of a page.
        page_bytes: bytes of a page; 0 when the model's KV cannot be cut: then nothing is ever kept.
        budget_bytes: RAM for pages.

    Attributes:
        queried_tokens, hit_tokens: prompt tokens asked for and found, so far.
        evicted_pages, lost_pages: so far.
    """

    def __init__(self, *, page_tokens: int, page_bytes: int, budget_bytes: int) -> None:
        self.to_executor: list[ExecutorMessage] = []
        self.to_prefill: list[PrefillMessage] = []
        self.page_bytes = page_bytes
        self.tree = PrefixTree(page_tokens=page_tokens, budget_pages=budget_bytes // page_bytes if page_bytes else 0)
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.evicted_pages = 0
        self.lost_pages = 0

    @property
    def held_bytes(self) -> int:
        """RAM that the pages take."""
        return self.tree.pages * self.page_bytes

    def match(self, message: Match) -> None:
        """Lease the longest stored prefix, all tokens but the last at most."""
        limit = len(message.tokens) - 1
        found = self.tree.match(message.row, message.tokens, limit)
        self.queried_tokens += limit
        self.hit_tokens += found.tokens
        self.to_prefill.append(Matched(message.row, found.pages, found.tokens))

    def store(self, message: Store) -> None:
        """Keep a row's new pages, as far as there is room; the engine frees the others."""
        done = self.tree.insert(message.tokens, message.first_page, message.last_page)
        self._free(done.evicted)
        ids = dict(done.added)
        indices = range(message.first_page, message.last_page)
        self.to_executor.append(AdoptPages(message.row, tuple((i, ids.get(i, NO_PAGE)) for i in indices)))

    def unlease(self, row: int) -> None:
        """A row's pages may go."""
        self.tree.unlease(row)

    def lost(self, pages: tuple[int, ...]) -> None:
        """Forget pages that the engine does not have, and those that only make sense behind them."""
        removed = self.tree.forget(pages)
        self.lost_pages += len(removed)
        if removed:
            self.to_executor.append(DropPages(removed))

    def reclaim(self, wanted_bytes: int) -> None:
        """Free pages that nobody leases, least recently used first, until so many bytes are free."""
        if self.page_bytes:
            self._free(self.tree.evict(-(-wanted_bytes // self.page_bytes)))

    def _free(self, pages: tuple[int, ...]) -> None:
        self.evicted_pages += len(pages)
        if pages:
            self.to_executor.append(DropPages(pages))


class CacheStoreActor(Actor[CacheStoreMessage]):
    """Owns the prefix tree."""

    prefill: Ref[PrefillMessage]
    executor: Ref[ExecutorMessage]

    def __init__(self, core: CacheStoreCore, *, inbox: int, clock: Clock) -> None:
        super().__init__("cache-store", inbox=inbox, clock=clock)
        self.core = core

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
            case PagesLost():
                core.lost(message.pages)
            case Reclaim():
                core.reclaim(message.bytes)
            case _:
                assert_never(message)

    def settle(self) -> None:
        """Send the engine its orders before prefill can act on them."""
        deliver(self.core.to_executor, self.executor)
        deliver(self.core.to_prefill, self.prefill)
