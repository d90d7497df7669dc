"""What the cache-store hears."""

from __future__ import annotations

import msgspec

from ..actor import Reply
from ..page_blob import PageBlob
from ..prefix_page import PageRecord


class Match(msgspec.Struct, frozen=True, tag=True):
    """Find and lease the longest cached prefix of a prompt; prefill gets Matched, and Restoring before if it is slow.

    Attributes:
        before: tokens that the row's last match gave it; None when it asks for the first time.
    """

    row: int
    tokens: tuple[int, ...]
    namespace: str = ""
    before: int | None = None


class Store(msgspec.Struct, frozen=True, tag=True):
    """Pieces of `row` lie aside on the executor: those of `tokens` that end at `ends`, ascending.

    Attributes:
        checkpoints: ends at which the piece carries a checkpoint.
    """

    row: int
    tokens: tuple[int, ...]
    ends: tuple[int, ...]
    checkpoints: tuple[int, ...] = ()
    namespace: str = ""


class Unlease(msgspec.Struct, frozen=True, tag=True):
    """`row` no longer needs the pages it was given."""

    row: int


class PagesLost(msgspec.Struct, frozen=True, tag=True):
    """The executor does not have these pages: forget them."""

    pages: tuple[int, ...]


class PagesAdopted(msgspec.Struct, frozen=True, tag=True):
    """The executor has named the pages of this store."""

    store: int


class PageRead(msgspec.Struct, frozen=True, tag=True):
    """A page's bytes, evaluated; None when the executor does not have it."""

    page: int
    blob: PageBlob | None


class PageLoaded(msgspec.Struct, frozen=True, tag=True):
    """A page was made of bytes, or could not be."""

    page: int
    error: str | None = None


class DiskOpened(msgspec.Struct, frozen=True, tag=True):
    """The disk tier is ready with what it holds, parents first; or it cannot be used."""

    records: tuple[PageRecord, ...]
    budget_bytes: int
    error: str | None = None


class PageWritten(msgspec.Struct, frozen=True, tag=True):
    """A page lies on disk with so many bytes, or could not be written."""

    page: int
    bytes: int
    error: str | None = None


class PageFetched(msgspec.Struct, frozen=True, tag=True):
    """A page's verified bytes from disk; None when they are not to be had."""

    page: int
    blob: PageBlob | None


class Reclaim(msgspec.Struct, frozen=True, tag=True):
    """Free at least so many bytes of pages that nobody leases, oldest first."""

    bytes: int


class SetBudget(msgspec.Struct, frozen=True, tag=True):
    """Pages may take so many bytes of RAM from now on; admission hears CacheHolds, and again as leases end."""

    bytes: int


class Flush(msgspec.Struct, frozen=True, tag=True):
    """Bring to disk what is in RAM only; the reply comes when that is done, or cannot be."""

    reply: Reply[None]


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Time has passed: look at deadlines."""


CacheStoreMessage = (
    Match
    | Store
    | Unlease
    | PagesLost
    | PagesAdopted
    | PageRead
    | PageLoaded
    | DiskOpened
    | PageWritten
    | PageFetched
    | Reclaim
    | SetBudget
    | Flush
    | Tick
)
