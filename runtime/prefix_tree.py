"""Which pages hold which token prefixes, and where: a tree of whole pages and tails over token ids, in two tiers.

A node is one page (or a tail: a shorter last piece); its path from the root of its namespace is the whole prefix. RAM
pages are known by ids, the KV itself is the engine's; disk pages by their chain. Models whose state cannot be cut carry
checkpoints: their matches end where one is. Owned by the cache-store; not thread-safe.

Invariants (each has a test of its name):
- `match_is_token_exact`: pages are compared by their tokens, never by a hash alone; a match may end inside one.
- `a_match_with_checkpoints_ends_at_one`: the deepest, never inside a page.
- `leased_pages_stay`: a page leased to a row is neither evicted nor reclaimed; a lease covers the page's whole path.
- `eviction_takes_leaves_first`: the least recently used page without children and leases in its tier goes first.
- `budget_is_never_exceeded`: an insertion that finds no room stores less.
- `tiers_are_closed`: with a page, all pages before it are in its tier.
- `namespaces_share_nothing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from .prefix_match import deepest_checkpoint, longest_slice, walk
from .prefix_page import KEY_BYTES, Page, PageRecord, token_key
from .prefix_tiers import TieredPages

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class PrefixMatch(msgspec.Struct, frozen=True):
    """The longest stored prefix of a prompt.

    Attributes:
        pages: ids, from the prompt's start; the last page may be used in part.
        tokens: how many tokens of them are meant.
        branch: tokens up to which whole pages are known past the deepest checkpoint; 0 when none are.
    """

    pages: tuple[int, ...] = ()
    tokens: int = 0
    branch: int = 0


class PrefixTree(TieredPages):
    """The tree.

    Args:
        page_tokens: tokens of a page.
        token_bytes: what a token's cuttable KV takes.
        budget_bytes, disk_budget_bytes: most bytes held in each tier.
        checkpoints: whether the model has state that cannot be cut, so that matches must end at a checkpoint.
        checkpoint_bytes: what a checkpoint takes at most.
    """

    def __init__(
        self,
        *,
        page_tokens: int,
        token_bytes: float,
        budget_bytes: int,
        checkpoints: bool = False,
        checkpoint_bytes: int = 0,
        disk_budget_bytes: int = 0,
    ) -> None:
        super().__init__(budget_bytes, disk_budget_bytes)
        self.page_tokens = page_tokens
        self.checkpoints = checkpoints
        self._token_bytes = token_bytes
        self._checkpoint_bytes = checkpoint_bytes
        self._width = page_tokens * KEY_BYTES

    def match(
        self, row: int, tokens: Sequence[int], limit: int, namespace: str = "", *, ram_only: bool = False
    ) -> PrefixMatch:
        """Lease to `row` the longest stored prefix of `tokens`, at most `limit` tokens; replaces its former lease.

        With `ram_only`, as if there were no disk.
        """
        self.unlease(row)
        root = self._roots.get(namespace)
        if root is None:
            return PrefixMatch()
        key = token_key(tokens[:limit])
        path = walk(root, key, self._width, ram_only=ram_only)
        covered = common = path[-1].end if path else 0
        if self.checkpoints:
            path = deepest_checkpoint(root, path, key, self._width, ram_only=ram_only)
            common = path[-1].end if path else 0
        else:
            node = path[-1] if path else root
            page, more = longest_slice(node, key[covered * KEY_BYTES :], ram_only=ram_only)
            if page is not None:
                path.append(page)
                common += more // KEY_BYTES
        self._touch(path)
        self.lease(row, path)
        return PrefixMatch(tuple([page.page_id for page in path]), common, covered if covered > common else 0)

    def insert(
        self, tokens: Sequence[int], ends: Sequence[int], checkpoints: Iterable[int] = (), namespace: str = ""
    ) -> tuple[tuple[int, int], ...]:
        """Take in pieces of `tokens` as far as there is room: (end, page id) of those that the engine must keep.

        A piece goes from the last page boundary before its end to its end. What is held already is left alone, unless
        the piece brings a checkpoint that was missing. Nothing is stored behind a gap.

        Args:
            ends: where the pieces end, ascending.
            checkpoints: ends at which the pieces carry state.
        """
        with_state = set(checkpoints)
        root = self._roots.get(namespace) or Page(0, b"", None, namespace)
        key = token_key(tokens)
        kept: list[tuple[int, int]] = []
        for end in ends:
            low = (end - 1) // self.page_tokens * self._width
            path = walk(root, key[:low], self._width)
            if len(path) * self._width != low or (path and not path[-1].in_ram):
                break
            page = self._take(path, root, key[low : end * KEY_BYTES], state=end in with_state)
            if page is not None:
                kept.append((end, page.page_id))
                path.append(page)
            self._touch(path)
        return tuple(kept)

    def _take(self, path: list[Page], root: Page, key: bytes, *, state: bool) -> Page | None:
        """The page that is to get this piece's KV; None when it is not wanted or finds no room."""
        parent = path[-1] if path else root
        page = parent.children.get(key)
        if page is None and not self.checkpoints and self._covered(parent, key):
            return None
        if page is not None and (page.ram_state >= state if page.in_ram else page.disk_state > state):
            return None
        size = self.size(len(key) // KEY_BYTES, state=state)
        with self.pin(path if page is None else [*path, page]):
            if not self._make_room(size - (0 if page is None else page.ram_bytes)):
                return None
        page = page or self._add(parent, key)
        self._set_ram(page, size, state=state)
        if not self.checkpoints:
            self._drop_shorter(parent, page)
        return page

    def _covered(self, parent: Page, key: bytes) -> bool:
        """Whether a piece in RAM begins with this tail."""
        if len(key) == self._width:
            return False
        return any(child.in_ram and child.key.startswith(key) for child in parent.children.values())

    def _drop_shorter(self, parent: Page, page: Page) -> None:
        """A new piece makes the tails that it begins with useless."""
        shorter = [tail for tail in parent.tails(page.key, self._width) if tail is not page and not tail.leases]
        self.forget([tail.page_id for tail in shorter])

    def size(self, tokens: int, *, state: bool) -> int:
        """Bytes that a piece takes in RAM. At least one, so that even empty pages are bounded."""
        return max(1, round(tokens * self._token_bytes)) + (self._checkpoint_bytes if state else 0)

    def restored(self, page: Page) -> bool:
        """Make room for a page that comes back from disk and count it as in RAM; False when there is none."""
        if page.in_ram:
            return True
        parent = page.parent
        if not page.on_disk or parent is None or not (parent.in_ram or parent.parent is None):
            return False
        size = self.size(len(page.key) // KEY_BYTES, state=page.disk_state)
        with self.pin(page.path()):
            if not self._make_room(size):
                return False
        self._set_ram(page, size, state=page.disk_state)
        return True

    def adopt(self, record: PageRecord) -> bool:
        """Take in what the disk holds from an earlier life; parents first. False when it fits nowhere."""
        root = self._roots.get(record.namespace) or Page(0, b"", None, record.namespace)
        parent = root if record.parent == root.chain else self._chains.get(record.parent)
        fits = parent is not None and len(parent.key) in (0, self._width) and 0 < len(record.key) <= self._width
        if parent is None or not fits or len(record.key) % KEY_BYTES or record.key in parent.children:
            return False
        if Page(0, record.key, parent, record.namespace).chain != record.chain:
            return False
        page = self._add(parent, record.key)
        page.used = record.used
        self._uses = max(self._uses, record.used)
        self.written(page, record.file_bytes, state=record.state)
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError unless links, leases, counters, budgets and orders agree.

        The integrity law: free + leased + evictable = budget, and what is leased is what rows and pins hold.
        """
        seen: dict[int, Page] = {}
        for root in self._roots.values():
            assert root.children, "an empty namespace"
            self._check_below(root, seen)
        assert seen == self._pages
        assert {page.chain: page for page in seen.values()} == self._chains
        self._check_sums(list(seen.values()))
        self._ram.check()
        self._disk.check()

    def _check_below(self, root: Page, seen: dict[int, Page]) -> None:
        stack = [root]
        while stack:
            node = stack.pop()
            assert sum(len(same) for same in node.by_first.values()) == len(node.children)
            assert node.ram_children == sum(child.in_ram for child in node.children.values())
            assert node.disk_children == sum(child.on_disk for child in node.children.values())
            for key, child in node.children.items():
                assert child.parent is node
                assert child.key == key
                assert len(key) == self._width or not child.children, "a tail has no children"
                assert child.in_ram or child.on_disk, "a page that is nowhere"
                assert node is root or node.in_ram >= child.in_ram, "RAM is not closed"
                assert node is root or node.on_disk >= child.on_disk, "the disk is not closed"
                assert child.page_id not in seen
                seen[child.page_id] = child
                stack.append(child)

    def _check_sums(self, pages: list[Page]) -> None:
        counts = {page.page_id: 0 for page in pages}
        for path in self._leases.values():
            for page in path:
                counts[page.page_id] += 1
        assert counts == {page.page_id: page.leases for page in pages}
        assert self.ram_bytes == sum(page.ram_bytes for page in pages) <= self.budget_bytes
        assert self.disk_bytes == sum(page.disk_bytes for page in pages)
        assert self.leased_bytes == sum(page.ram_bytes for page in pages if page.leases)
        assert self.ram_pages == sum(page.in_ram for page in pages)
        assert self.disk_pages == sum(page.on_disk for page in pages)
        assert all((page.ram_bytes > 0) == page.in_ram for page in pages)
