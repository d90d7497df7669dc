"""One stored piece of a prefix, and the order in which a tier gives its pieces up. See prefix_tree.py."""

from __future__ import annotations

import heapq
from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KEY_BYTES = array("i").itemsize
"""Bytes of one token in a key."""
CHAIN_BYTES = 20
Tier = Literal["ram", "disk"]


class PageRecord(msgspec.Struct, frozen=True):
    """A page as the disk's index holds it.

    Attributes:
        chain: names the page and everything before it, see `Page.chain`.
        parent: chain of the page before it; of the namespace for a first page.
        namespace: whose prefixes these are.
        key: its tokens, as int32 bytes.
        state: whether a checkpoint is in it.
        file_bytes: size of its file.
        used: higher is more recent.
    """

    chain: bytes
    parent: bytes
    namespace: str
    key: bytes
    state: bool
    file_bytes: int
    used: int


class Page:
    """A whole page, or a tail (a shorter last piece) in the tree.

    Attributes:
        key: its tokens as int32 bytes; the path from the root is the whole prefix.
        chain: digest over the namespace and all tokens up to its end.
        end: tokens from the prompt's start to its end.
        leases: rows that are about to read it, and writes in progress: it stays in RAM.
        used: counts up with every use of the tree.
        ram_bytes, disk_bytes: what its copies take; 0 where there is none.
        in_ram, on_disk: where copies are.
        ram_state, disk_state: whether that copy has a checkpoint at `end`.
    """

    __slots__ = (
        "by_first",
        "chain",
        "children",
        "disk_bytes",
        "disk_children",
        "disk_state",
        "end",
        "in_ram",
        "key",
        "leases",
        "namespace",
        "on_disk",
        "page_id",
        "parent",
        "ram_bytes",
        "ram_children",
        "ram_state",
        "used",
    )

    def __init__(self, page_id: int, key: bytes, parent: Page | None, namespace: str) -> None:
        self.page_id = page_id
        self.key = key
        self.parent = parent
        self.namespace = namespace
        self.chain: bytes = root_chain(namespace) if parent is None else child_chain(parent.chain, key)
        self.end: int = (0 if parent is None else parent.end) + len(key) // KEY_BYTES
        self.children: dict[bytes, Page] = {}
        self.by_first: dict[bytes, dict[int, Page]] = {}
        self.leases = 0
        self.used = 0
        self.in_ram = self.on_disk = False
        self.ram_state = self.disk_state = False
        self.ram_bytes = self.disk_bytes = 0
        self.ram_children = self.disk_children = 0

    @property
    def state(self) -> bool:
        """Whether a checkpoint at its end can be had."""
        return self.ram_state if self.in_ram else self.disk_state

    @property
    def clean(self) -> bool:
        """Whether the disk has all that RAM has."""
        return self.on_disk and self.disk_state >= self.ram_state

    def add_child(self, child: Page) -> None:
        """Link a page below this one."""
        self.children[child.key] = child
        self.by_first.setdefault(child.key[:KEY_BYTES], {})[child.page_id] = child

    def remove_child(self, child: Page) -> None:
        """Unlink a page below this one."""
        del self.children[child.key]
        same_first = self.by_first[child.key[:KEY_BYTES]]
        del same_first[child.page_id]
        if not same_first:
            del self.by_first[child.key[:KEY_BYTES]]

    def tails(self, rest: bytes, width: int) -> Iterator[Page]:
        """Children shorter than a page that `rest` starts with."""
        for child in self.by_first.get(rest[:KEY_BYTES], {}).values():
            if len(child.key) < width and rest.startswith(child.key):
                yield child

    def path(self) -> list[Page]:
        """From the first page to this one."""
        out: list[Page] = []
        node: Page | None = self
        while node is not None and node.parent is not None:
            out.append(node)
            node = node.parent
        return out[::-1]

    def record(self, file_bytes: int) -> PageRecord:
        """As the disk's index holds it."""
        assert self.parent is not None
        before = self.parent.chain
        return PageRecord(self.chain, before, self.namespace, self.key, self.ram_state, file_bytes, self.used)


class TierOrder:
    """Least recently used first, of the pages of a tier that may go. Entries that no longer hold are skipped."""

    def __init__(self, tier: Tier, pages: dict[int, Page]) -> None:
        self._tier = tier
        self._pages = pages
        self._heap: list[tuple[int, int]] = []

    def may_go(self, page: Page) -> bool:
        """Leaves of the tier that nobody leases."""
        if page.leases:
            return False
        if self._tier == "ram":
            return page.in_ram and not page.ram_children
        return page.on_disk and not page.disk_children

    def offer(self, page: Page) -> None:
        """A page may have become one that may go."""
        if not self.may_go(page):
            return
        heapq.heappush(self._heap, (page.used, page.page_id))
        if len(self._heap) > 4 * len(self._pages) + 64:
            self._heap = sorted(entry for entry in set(self._heap) if self._holds(entry))

    def pop(self) -> Page | None:
        """Take out the page that goes first; None when none may."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._holds(entry):
                return self._pages[entry[1]]
        return None

    def oldest(self, count: int) -> list[Page]:
        """Pages that go next; they stay."""
        found = heapq.nsmallest(count, {entry for entry in self._heap if self._holds(entry)})
        return [self._pages[entry[1]] for entry in found]

    def check(self) -> None:
        """Raise AssertionError if a page that may go is missing."""
        held = set(self._heap)
        missing = [page for page in self._pages.values() if self.may_go(page) and (page.used, page.page_id) not in held]
        assert not missing, f"{self._tier}: {len(missing)} pages can never go"

    def _holds(self, entry: tuple[int, int]) -> bool:
        page = self._pages.get(entry[1])
        return page is not None and page.used == entry[0] and self.may_go(page)


def token_key(tokens: Sequence[int]) -> bytes:
    """Tokens as a key."""
    return array("i", tokens).tobytes()


def root_chain(namespace: str) -> bytes:
    """Digest that stands for a namespace."""
    return blake2b(namespace.encode(), digest_size=CHAIN_BYTES, person=b"troupe-root").digest()


def child_chain(parent: bytes, key: bytes) -> bytes:
    """Digest that stands for a prefix one page longer."""
    return blake2b(key, key=parent, digest_size=CHAIN_BYTES).digest()


def common_bytes(first: bytes, second: bytes) -> int:
    """Length of the longest equal start, in whole tokens' bytes, by halving."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low - low % KEY_BYTES
