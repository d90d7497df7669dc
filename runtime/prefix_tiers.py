"""The pages of a prefix tree in their two tiers: where copies are, who leases them, what goes when room is needed.

Owned by the cache-store; not thread-safe. Both tiers are closed: with a page, all pages before it are in the tier.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from .prefix_page import Page, TierOrder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class TieredPages:
    """What the tree keeps beside its shape.

    Attributes:
        ram_bytes, disk_bytes: held now.
        leased_bytes: of those in RAM, what rows have leased.
        ram_pages, disk_pages: held now.
        evicted_pages, disk_evicted_pages: that went for want of room, so far.
        unsaved_evictions: of the first, those that no disk had.
        dropped: page ids whose RAM copy has gone since this was last emptied.
        deleted: chains whose disk copy is to go.
    """

    def __init__(self, budget_bytes: int, disk_budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.disk_budget_bytes = disk_budget_bytes
        self.ram_bytes = self.disk_bytes = self.leased_bytes = 0
        self.ram_pages = self.disk_pages = 0
        self.evicted_pages = self.disk_evicted_pages = self.unsaved_evictions = 0
        self.dropped: list[int] = []
        self.deleted: list[bytes] = []
        self._roots: dict[str, Page] = {}
        self._pages: dict[int, Page] = {}
        self._chains: dict[bytes, Page] = {}
        self._leases: dict[int, list[Page]] = {}
        self._ram = TierOrder("ram", self._pages)
        self._disk = TierOrder("disk", self._pages)
        self._last_id = 0
        self._uses = 0

    @property
    def evictable_bytes(self) -> int:
        """Bytes of RAM pages that could go, leaves first, until only leased ones are left."""
        return self.ram_bytes - self.leased_bytes

    @property
    def leased(self) -> int:
        """Rows and writes that hold leases."""
        return len(self._leases)

    def page(self, page_id: int) -> Page | None:
        """A page by its id."""
        return self._pages.get(page_id)

    def all_pages(self) -> Iterable[Page]:
        """Every page, in no order."""
        return self._pages.values()

    def ram_ids(self) -> set[int]:
        """Ids of all pages in RAM: what the engine must hold, and nothing else."""
        return {page.page_id for page in self._pages.values() if page.in_ram}

    def cold(self, row: int) -> list[Page]:
        """Of what `row` has leased, the pages that are on disk only."""
        return [page for page in self._leases.get(row, ()) if not page.in_ram]

    # --- leases -----------------------------------------------------------------------------------------------------

    def lease(self, row: int, path: list[Page]) -> None:
        """Keep these pages until `unlease`; replaces the row's former lease."""
        self.unlease(row)
        if path:
            self._leases[row] = list(path)
            self._hold(path)

    def unlease(self, row: int) -> None:
        """End the lease of `row`; nothing happens when it has none."""
        self._release(self._leases.pop(row, []))

    @contextmanager
    def pin(self, path: Iterable[Page]) -> Iterator[None]:
        """Keep these pages for the length of a block."""
        pinned = list(path)
        self._hold(pinned)
        try:
            yield
        finally:
            self._release(pinned)

    def _hold(self, pages: Iterable[Page]) -> None:
        for page in pages:
            page.leases += 1
            if page.leases == 1:
                self.leased_bytes += page.ram_bytes

    def _release(self, pages: Iterable[Page]) -> None:
        for page in pages:
            page.leases -= 1
            if not page.leases:
                self.leased_bytes -= page.ram_bytes
                self._offer(page)

    # --- RAM --------------------------------------------------------------------------------------------------------

    def evict(self, bytes_: int) -> int:
        """Free so many bytes of RAM, or what can be freed: unleased, leaves first, least recently used first."""
        freed = 0
        while freed < bytes_ and (page := self._ram.pop()) is not None:
            freed += page.ram_bytes
            self.evicted_pages += 1
            self.unsaved_evictions += not page.on_disk
            self._drop_ram(page)
        return freed

    def next_to_go(self, count: int) -> list[Page]:
        """Pages that RAM would give up next."""
        return self._ram.oldest(count)

    def _make_room(self, bytes_: int) -> bool:
        over = self.ram_bytes + bytes_ - self.budget_bytes
        return over <= 0 or (over <= self.evictable_bytes and self.evict(over) >= over)

    def _set_ram(self, page: Page, bytes_: int, *, state: bool) -> None:
        if not page.in_ram:
            page.in_ram = True
            self.ram_pages += 1
            assert page.parent is not None
            page.parent.ram_children += 1
        change = bytes_ - page.ram_bytes
        page.ram_bytes, page.ram_state = bytes_, state
        self.ram_bytes += change
        self.leased_bytes += change if page.leases else 0
        self._offer(page)

    def _drop_ram(self, page: Page) -> None:
        self.ram_bytes -= page.ram_bytes
        self.leased_bytes -= page.ram_bytes if page.leases else 0
        self.ram_pages -= 1
        page.in_ram, page.ram_bytes, page.ram_state = False, 0, False
        self.dropped.append(page.page_id)
        self._left(page)
        if page.parent is not None:
            page.parent.ram_children -= 1
            self._offer(page.parent)

    # --- disk -------------------------------------------------------------------------------------------------------

    def make_disk_room(self, bytes_: int) -> bool:
        """See that a file of so many bytes fits, by deleting others; False when it cannot."""
        while self.disk_bytes + bytes_ > self.disk_budget_bytes:
            page = self._disk.pop()
            if page is None:
                return False
            self.disk_evicted_pages += 1
            self.lose_disk(page)
        return True

    def written(self, page: Page, bytes_: int, *, state: bool) -> None:
        """The disk has a page now."""
        if not page.on_disk:
            page.on_disk = True
            self.disk_pages += 1
            assert page.parent is not None
            page.parent.disk_children += 1
        self.disk_bytes += bytes_ - page.disk_bytes
        page.disk_bytes, page.disk_state = bytes_, state
        self._offer(page)

    def lose_disk(self, page: Page) -> None:
        """The disk has, or is to have, this page no more, nor those behind it."""
        for below in self._below(page):
            if below.on_disk:
                self._drop_disk(below)

    def _drop_disk(self, page: Page) -> None:
        self.disk_bytes -= page.disk_bytes
        self.disk_pages -= 1
        page.on_disk, page.disk_bytes, page.disk_state = False, 0, False
        self.deleted.append(page.chain)
        if page.parent is not None:
            page.parent.disk_children -= 1
            self._offer(page.parent)
        self._left(page)

    # --- both -------------------------------------------------------------------------------------------------------

    def forget(self, pages: Iterable[int]) -> int:
        """Remove pages and all below them from both tiers, leased or not; returns how many."""
        count = 0
        for page_id in pages:
            page = self._pages.get(page_id)
            if page is None:
                continue
            for below in self._below(page):
                count += 1
                self._end_leases(below)
                if below.in_ram:
                    self._drop_ram(below)
                if below.on_disk:
                    self._drop_disk(below)
        return count

    def clear_ram(self) -> None:
        """Forget every RAM copy: the engine has lost them."""
        for root in list(self._roots.values()):
            for page in self._below(root):
                if page.in_ram:
                    self._drop_ram(page)

    def _end_leases(self, page: Page) -> None:
        if not page.leases:
            return
        for path in self._leases.values():
            if page in path:
                path.remove(page)
        self.leased_bytes -= page.ram_bytes
        page.leases = 0

    def _below(self, page: Page) -> list[Page]:
        """A page and all pages behind it, children first; without the root."""
        order, stack = [], [page]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                order.append(node)
            stack.extend(node.children.values())
        return order[::-1]

    def _add(self, parent: Page, key: bytes) -> Page:
        self._last_id += 1
        page = Page(self._last_id, key, parent, parent.namespace)
        parent.add_child(page)
        if parent.parent is None:
            self._roots[parent.namespace] = parent
        self._pages[page.page_id] = page
        self._chains[page.chain] = page
        return page

    def _left(self, page: Page) -> None:
        """A page has lost a copy: without any it goes."""
        if page.in_ram or page.on_disk:
            self._offer(page)
            return
        parent = page.parent
        if parent is None or self._pages.get(page.page_id) is not page:
            return
        parent.remove_child(page)
        del self._pages[page.page_id], self._chains[page.chain]
        if parent.parent is None and not parent.children:
            self._roots.pop(parent.namespace, None)

    def _touch(self, path: list[Page]) -> None:
        """Mark a path as just used, the deepest page least recently, so that leaves go before their parents."""
        for page in reversed(path):
            self._uses += 1
            page.used = self._uses
            self._offer(page)

    def _offer(self, page: Page) -> None:
        if page.parent is not None:
            self._ram.offer(page)
            self._disk.offer(page)
