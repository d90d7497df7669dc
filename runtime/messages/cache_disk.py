"""What the cache's I/O thread is told."""

from __future__ import annotations

import msgspec

from ..page_blob import PageBlob
from ..prefix_page import PageRecord


class WritePage(msgspec.Struct, frozen=True, tag=True):
    """Put a page on disk; the cache-store hears PageWritten."""

    page: int
    record: PageRecord
    blob: PageBlob


class FetchPage(msgspec.Struct, frozen=True, tag=True):
    """Read and verify a page; the cache-store hears PageFetched."""

    page: int
    chain: bytes


class DeletePages(msgspec.Struct, frozen=True, tag=True):
    """Remove pages from disk."""

    chains: tuple[bytes, ...]


class TouchPages(msgspec.Struct, frozen=True, tag=True):
    """Remember when pages were used last: (chain, use) pairs."""

    used: tuple[tuple[bytes, int], ...]


CacheDiskMessage = WritePage | FetchPage | DeletePages | TouchPages
