"""The cache-store's decisions: what is kept, what rows get, what goes to disk and comes back.

Orders reach the engine's thread in the order they are given, so a page is named or loaded before any chunk can ask for
it, and freed only after the last chunk that does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..runtime.messages.admission import CacheHolds
from ..runtime.messages.cache_disk import CacheDiskMessage, DeletePages, TouchPages
from ..runtime.messages.executor import NO_PAGE, AdoptPages, DropPages
from ..runtime.messages.prefill import Matched, Restoring, StorePressure
from ..runtime.prefix_tree import PrefixTree
from ..runtime.service import CacheStatistics
from .cache_misses import MissLog
from .cache_restore import Restore
from .cache_spill import Mode, Spill

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..runtime.clock import Clock
    from ..runtime.messages.admission import AdmissionMessage
    from ..runtime.messages.cache_store import DiskOpened, Match, PageFetched, PageLoaded, PageRead, PageWritten, Store
    from ..runtime.messages.executor import ExecutorMessage
    from ..runtime.messages.prefill import PrefillMessage
    from ..runtime.prefix_tree import PrefixMatch


class CachePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Settings and facts of the cache.

    Attributes:
        page_tokens: tokens of a page.
        page_bytes: bytes of a page's cuttable KV.
        budget_bytes: RAM for pages; 0 keeps nothing.
        checkpoints, checkpoint_bytes: see EngineFacts.
        spill: when pages go to disk, if there is one.
        spill_queue: most pages waiting for the disk.
        restore_timeout_s: longest a row waits for pages from disk.
        max_stores: stores under way at which prefill begins no new prompt.
    """

    page_tokens: int
    page_bytes: int
    budget_bytes: int
    checkpoints: bool = False
    checkpoint_bytes: int = 0
    spill: Mode = "write-through"
    spill_queue: int = 64
    restore_timeout_s: float = 5.0
    max_stores: int = 16


class CacheStoreCore:
    """Owned by the cache-store actor.

    Attributes:
        tree: the pages.
        lost_pages: so far.
    """

    def __init__(self, policy: CachePolicy, *, clock: Clock) -> None:
        self.to_executor: list[ExecutorMessage] = []
        self.to_prefill: list[PrefillMessage] = []
        self.to_disk: list[CacheDiskMessage] = []
        self.to_admission: list[AdmissionMessage] = []
        self.tree = PrefixTree(
            page_tokens=policy.page_tokens,
            token_bytes=policy.page_bytes / policy.page_tokens,
            budget_bytes=policy.budget_bytes,
            checkpoints=policy.checkpoints,
            checkpoint_bytes=policy.checkpoint_bytes,
        )
        self.spill = Spill(self.tree, policy.spill, policy.spill_queue, clock)
        self.restore = Restore(self.tree, policy.restore_timeout_s, clock)
        self.misses = MissLog(policy.page_tokens)
        self.lost_pages = 0
        self._max_stores = policy.max_stores
        self._stores: set[int] = set()
        self._store = 0
        self._full = False
        self._told_bytes: int | None = 0
        self._counts = dict.fromkeys(
            ("queries", "hits_ram", "hits_disk", "hits_partial", "queried_tokens", "hit_tokens", "stored_pages"), 0
        )

    # --- rows -------------------------------------------------------------------------------------------------------

    def match(self, message: Match) -> None:
        """Lease the longest stored prefix, all tokens but the last at most; pages on disk only are fetched first."""
        self.restore.drop(message.row)
        found = self.tree.match(message.row, message.tokens, len(message.tokens) - 1, message.namespace)
        cold = self.tree.cold(message.row)
        self._count(message, found, from_disk=bool(cold))
        if message.before is None:
            self.misses.look(message.tokens, message.namespace, found.tokens)
        if cold:
            self.to_prefill.append(Restoring(message.row))
            self.restore.begin(message, cold)
        else:
            self.to_prefill.append(Matched(message.row, found.pages, found.tokens, found.branch))
        self._collect()

    def store(self, message: Store) -> None:
        """Keep a row's new pieces, as far as there is room; the engine frees the others."""
        self._store += 1
        self._stores.add(self._store)
        kept = self.tree.insert(message.tokens, message.ends, message.checkpoints, message.namespace)
        self._counts["stored_pages"] += len(kept)
        self._collect()
        ids = dict(kept)
        pages = tuple([(end, ids.get(end, NO_PAGE)) for end in message.ends])
        self.to_executor.append(AdoptPages(message.row, pages, self._store))
        self.misses.stored(message.tokens, message.namespace)
        self.spill.stored(ids.values())

    def adopted(self, store: int) -> None:
        """The engine has done a store."""
        self._stores.discard(store)

    def unlease(self, row: int) -> None:
        """A row's pages may go."""
        self.restore.drop(row)
        self.tree.unlease(row)

    def lost(self, pages: tuple[int, ...]) -> None:
        """Forget pages that the engine does not have, and those that only make sense behind them."""
        self.lost_pages += self.tree.forget(pages)
        self._collect()

    def reclaim(self, wanted_bytes: int) -> None:
        """Free pages that nobody leases, least recently used first, until so many bytes are free."""
        self.tree.evict(wanted_bytes)
        self._collect()

    def set_budget(self, budget_bytes: int) -> None:
        """Keep to another budget from now on; the answer goes out at the end of the turn."""
        self.tree.budget_bytes = budget_bytes
        self._told_bytes = None

    def _keep_to_budget(self) -> None:
        """What leases kept above a lowered budget goes as they end; admission hears each time."""
        tree = self.tree
        over = self._told_bytes is None or self._told_bytes > tree.budget_bytes
        if not over:
            return
        if tree.ram_bytes > tree.budget_bytes:
            tree.evict(tree.ram_bytes - tree.budget_bytes)
            self._collect()
        if self._told_bytes != tree.ram_bytes:
            self._told_bytes = tree.ram_bytes
            self.to_admission.append(CacheHolds(tree.budget_bytes, tree.ram_bytes))

    def _count(self, message: Match, found: PrefixMatch, *, from_disk: bool) -> None:
        counts, before = self._counts, message.before
        if before is None:
            counts["queries"] += 1
            counts["queried_tokens"] += len(message.tokens) - 1
        counts["hit_tokens"] += found.tokens - (before or 0)
        if found.tokens and not before:
            counts["hits_disk" if from_disk else "hits_ram"] += 1
            counts["hits_partial"] += bool(found.tokens % self.tree.page_tokens)

    # --- disk -------------------------------------------------------------------------------------------------------

    def disk_opened(self, message: DiskOpened) -> None:
        """Take in what the disk holds, within the budget."""
        if message.error is not None:
            return
        self.tree.disk_budget_bytes = message.budget_bytes
        strangers = [record.chain for record in message.records if not self.tree.adopt(record)]
        if strangers:
            self.to_disk.append(DeletePages(tuple(strangers)))
        self.tree.make_disk_room(0)
        self.spill.open = True
        self._collect()

    def page_read(self, message: PageRead) -> None:
        """A page's bytes, on their way to disk."""
        self.spill.read(message)
        self._collect()

    def page_written(self, message: PageWritten) -> None:
        """A page is on disk, or is not."""
        self.spill.written(message)
        self._collect()

    def page_fetched(self, message: PageFetched) -> None:
        """A page's bytes from disk."""
        self.restore.fetched(message)
        self._collect()

    def page_loaded(self, message: PageLoaded) -> None:
        """A page from disk is in RAM, or is not."""
        self.restore.loaded(message)
        self._collect()

    def last_uses(self) -> TouchPages:
        """What the disk should remember of the order of use."""
        return TouchPages(tuple((page.chain, page.used) for page in self.tree.all_pages() if page.on_disk))

    # --- each turn --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Answer rows that need not wait any longer, go on with the disk, and say whether stores pile up."""
        for match in self.restore.take_done():
            found = self.tree.match(match.row, match.tokens, len(match.tokens) - 1, match.namespace, ram_only=True)
            self.to_prefill.append(Matched(match.row, found.pages, found.tokens, found.branch))
        self.spill.pump()
        self._collect()
        self._keep_to_budget()
        full = len(self._stores) >= self._max_stores
        if full != self._full:
            self._full = full
            self.to_prefill.append(StorePressure(full))

    def _collect(self) -> None:
        """Orders of the turn so far, what has gone before what takes its place."""
        if self.tree.dropped:
            self.to_executor.append(DropPages(tuple(self.tree.dropped)))
            self.tree.dropped.clear()
        if self.tree.deleted:
            self.to_disk.append(DeletePages(tuple(self.tree.deleted)))
            self.tree.deleted.clear()
        for part in (self.spill, self.restore):
            self.to_executor += part.to_executor
            self.to_disk += part.to_disk
            part.to_executor.clear()
            part.to_disk.clear()

    @property
    def idle(self) -> bool:
        """True when no store, spill or restore is under way."""
        return not self._stores and self.spill.idle and self.restore.idle

    def statistics(self) -> CacheStatistics:
        """A snapshot."""
        tree, spill, restore = self.tree, self.spill, self.restore
        return CacheStatistics(
            **self._counts,
            spilled_pages=spill.spilled,
            restored_pages=restore.restored,
            dropped_spills=spill.dropped,
            evicted_pages=tree.evicted_pages,
            disk_evicted_pages=tree.disk_evicted_pages,
            lost_pages=self.lost_pages + restore.lost,
            disk_faults=spill.faults,
            restore_s=restore.waited_s,
            restore_timeouts=restore.timeouts,
            ram_pages=tree.ram_pages,
            ram_bytes=tree.ram_bytes,
            evictable_bytes=tree.evictable_bytes,
            disk_pages=tree.disk_pages,
            disk_bytes=tree.disk_bytes,
            stores_in_flight=len(self._stores),
            spill_queue=spill.waiting,
        )

    def check_integrity(self, engine_pages: Iterable[int]) -> None:
        """When idle: the tree is whole, and the engine holds its pages and no others."""
        self.tree.check_integrity()
        assert self.tree.ram_ids() == set(engine_pages)
