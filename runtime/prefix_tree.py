"""Which pages hold the KV of which token prefixes: a tree of whole pages over token ids.

A node is one page; its key is the page's own tokens, its path from the root is the whole prefix. Only page ids live
here, the KV itself is the engine's. Owned by the cache-store; not thread-safe.

Invariants (each has a test of its name):
- `match_is_token_exact`: pages are compared by their tokens, never by a hash alone; a match may end inside one.
- `leased_pages_stay`: a page leased to a row is neither evicted nor reclaimed; a lease covers the page's whole path.
- `eviction_takes_leaves_first`: the least recently used page without children and leases goes first.
- `budget_is_never_exceeded`: an insertion that finds no room stores less.
"""

from __future__ import annotations

import heapq
from array import array
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_BYTES = array("i").itemsize


class PrefixMatch(msgspec.Struct, frozen=True):
    """Pages from the prompt's start and how many tokens of them are meant; the last page may be used in part."""

    pages: tuple[int, ...] = ()
    tokens: int = 0


class Insertion(msgspec.Struct, frozen=True):
    """What an insertion did: (page index, new page id) pairs, and ids evicted to make room."""

    added: tuple[tuple[int, int], ...] = ()
    evicted: tuple[int, ...] = ()


class Page:
    """One page in the tree. `key` is its tokens as int32 bytes; `used` counts up with every use of the tree."""

    __slots__ = ("by_first", "children", "key", "leases", "page_id", "parent", "used")

    def __init__(self, page_id: int, key: bytes, parent: Page | None) -> None:
        self.page_id = page_id
        self.key = key
        self.parent = parent
        self.children: dict[bytes, Page] = {}
        self.by_first: dict[bytes, dict[int, Page]] = {}
        self.leases = 0
        self.used = 0

    def add_child(self, child: Page) -> None:
        """Link a page below this one."""
        self.children[child.key] = child
        self.by_first.setdefault(child.key[:_BYTES], {})[child.page_id] = child

    def remove_child(self, child: Page) -> None:
        """Unlink a page below this one."""
        del self.children[child.key]
        same_first = self.by_first[child.key[:_BYTES]]
        del same_first[child.page_id]
        if not same_first:
            del self.by_first[child.key[:_BYTES]]


class PrefixTree:
    """The tree.

    Args:
        page_tokens: tokens of a page.
        budget_pages: most pages held.
    """

    def __init__(self, *, page_tokens: int, budget_pages: int) -> None:
        self.page_tokens = page_tokens
        self.budget_pages = budget_pages
        self.leased_pages = 0
        self._root = Page(0, b"", None)
        self._pages: dict[int, Page] = {}
        self._leases: dict[int, list[Page]] = {}
        self._idle: list[tuple[int, int]] = []  # heap of (used, id); entries that no longer hold are skipped
        self._last_id = 0
        self._uses = 0

    @property
    def pages(self) -> int:
        """Pages held."""
        return len(self._pages)

    @property
    def evictable_pages(self) -> int:
        """Pages that could be evicted, leaves first, until only leased ones are left."""
        return len(self._pages) - self.leased_pages

    def match(self, row: int, tokens: Sequence[int], limit: int) -> PrefixMatch:
        """Lease to `row` the longest stored prefix of `tokens`, at most `limit` tokens; replaces its former lease."""
        self.unlease(row)
        key = _key(tokens[:limit])
        path, covered = self._walk(key)
        page, common = _longest_common(path[-1] if path else self._root, key[covered:])
        if page is not None:
            path.append(page)
        if not path:
            return PrefixMatch()
        self._touch(path)
        self._lease(row, path)
        return PrefixMatch(tuple(page.page_id for page in path), (covered + common) // _BYTES)

    def unlease(self, row: int) -> None:
        """End the lease of `row`; nothing happens when it has none."""
        for page in self._leases.pop(row, ()):
            page.leases -= 1
            if not page.leases:
                self.leased_pages -= 1
                self._offer_leaf(page)

    def insert(self, tokens: Sequence[int], first_page: int, last_page: int) -> Insertion:
        """Store pages `first_page` .. `last_page` - 1 of `tokens`, as far as there is room.

        Pages that are held already are left alone. Without the pages before `first_page` nothing can be stored.
        """
        width = self.page_tokens * _BYTES
        key = _key(tokens[: last_page * self.page_tokens])
        path, covered = self._walk(key)
        held = covered // width
        if held < first_page:
            return Insertion()
        added: list[tuple[int, int]] = []
        evicted: list[int] = []
        parent = path[-1] if path else self._root
        for index in range(held, last_page):
            if not self._make_room(path, evicted):
                break
            parent = self._add(parent, key[index * width : (index + 1) * width])
            path.append(parent)
            added.append((index, parent.page_id))
        self._touch(path)
        return Insertion(tuple(added), tuple(evicted))

    def evict(self, count: int) -> tuple[int, ...]:
        """Remove up to `count` pages that nobody leases, leaves first, least recently used first; returns their ids."""
        evicted: list[int] = []
        while len(evicted) < count and (page := self._pop_leaf(())) is not None:
            evicted.append(page.page_id)
            self._remove(page)
        return tuple(evicted)

    def forget(self, pages: Iterable[int]) -> tuple[int, ...]:
        """Remove pages and all below them, leased or not; returns every id removed."""
        removed: list[int] = []
        for page_id in pages:
            page = self._pages.get(page_id)
            stack = [] if page is None else [page]
            order: list[Page] = []
            while stack:
                order.append(stack.pop())
                stack.extend(order[-1].children.values())
            for below in reversed(order):
                self._drop_leases(below)
                self._remove(below)
                removed.append(below.page_id)
        return tuple(removed)

    def check_integrity(self) -> None:
        """Raise AssertionError unless links, leases, counters, budget and the idle heap agree."""
        seen: dict[int, Page] = {}
        stack = [self._root]
        while stack:
            node = stack.pop()
            assert sum(len(same) for same in node.by_first.values()) == len(node.children)
            for key, child in node.children.items():
                assert child.parent is node
                assert child.key == key
                assert len(key) == self.page_tokens * _BYTES
                assert node is self._root or node.leases >= child.leases
                assert child.page_id not in seen
                seen[child.page_id] = child
                stack.append(child)
        assert seen == self._pages
        assert len(seen) <= self.budget_pages
        counts = dict.fromkeys(seen, 0)
        for path in self._leases.values():
            for page in path:
                counts[page.page_id] += 1
        assert counts == {page_id: page.leases for page_id, page in seen.items()}
        assert self.leased_pages == sum(count > 0 for count in counts.values())
        idle = {entry for entry in self._idle if entry[1] in seen}
        leaves = {(page.used, page.page_id) for page in seen.values() if not page.children and not page.leases}
        assert leaves <= idle

    def _walk(self, key: bytes) -> tuple[list[Page], int]:
        """Whole pages along `key`, and how many of its bytes they cover."""
        width = self.page_tokens * _BYTES
        path: list[Page] = []
        node, at = self._root, 0
        while at + width <= len(key) and (child := node.children.get(key[at : at + width])) is not None:
            path.append(child)
            node, at = child, at + width
        return path, at

    def _touch(self, path: list[Page]) -> None:
        """Mark a path as just used, the deepest page least recently, so that leaves go before their parents."""
        for page in reversed(path):
            self._uses += 1
            page.used = self._uses
            self._offer_leaf(page)

    def _lease(self, row: int, path: list[Page]) -> None:
        for page in path:
            page.leases += 1
            self.leased_pages += page.leases == 1
        self._leases[row] = path

    def _drop_leases(self, page: Page) -> None:
        """Take a page that is about to go out of every lease."""
        if not page.leases:
            return
        for path in self._leases.values():
            if page in path:
                path.remove(page)
        page.leases = 0
        self.leased_pages -= 1

    def _make_room(self, path: list[Page], evicted: list[int]) -> bool:
        """See that one more page fits, without evicting the path that it hangs on."""
        if len(self._pages) < self.budget_pages:
            return True
        page = self._pop_leaf(path)
        if page is None:
            return False
        evicted.append(page.page_id)
        self._remove(page)
        return True

    def _add(self, parent: Page, key: bytes) -> Page:
        self._last_id += 1
        page = Page(self._last_id, key, parent)
        parent.add_child(page)
        self._pages[page.page_id] = page
        return page

    def _remove(self, page: Page) -> None:
        parent = page.parent
        assert parent is not None
        parent.remove_child(page)
        del self._pages[page.page_id]
        page.parent = None
        if parent is not self._root:
            self._offer_leaf(parent)

    def _offer_leaf(self, page: Page) -> None:
        if not page.children and not page.leases:
            heapq.heappush(self._idle, (page.used, page.page_id))
            if len(self._idle) > 4 * len(self._pages) + 64:
                self._idle = sorted(entry for entry in set(self._idle) if self._holds(entry))

    def _holds(self, entry: tuple[int, int]) -> bool:
        page = self._pages.get(entry[1])
        return page is not None and page.used == entry[0] and not page.children and not page.leases

    def _pop_leaf(self, spare: Sequence[Page]) -> Page | None:
        """The least recently used page that may go; `spare` is a path whose last page may not."""
        spared: tuple[int, int] | None = None
        found: Page | None = None
        while self._idle and found is None:
            entry = heapq.heappop(self._idle)
            if not self._holds(entry):
                continue
            page = self._pages[entry[1]]
            if spare and page is spare[-1]:
                spared = entry
            else:
                found = page
        if spared is not None:
            heapq.heappush(self._idle, spared)
        return found


def _key(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def _longest_common(node: Page, rest: bytes) -> tuple[Page | None, int]:
    """The child that shares the longest start with `rest`, and how many bytes (whole tokens) it shares."""
    best, best_common = None, 0
    for child in node.by_first.get(rest[:_BYTES], {}).values():
        low, high = _BYTES, min(len(rest), len(child.key))
        while low < high:  # the longest equal start, by halving
            middle = (low + high + 1) // 2
            if rest[:middle] == child.key[:middle]:
                low = middle
            else:
                high = middle - 1
        common = low - low % _BYTES
        if common > best_common:
            best, best_common = child, common
    return best, best_common
