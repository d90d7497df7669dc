"""What the cache-store hears."""

from __future__ import annotations

import msgspec


class Match(msgspec.Struct, frozen=True, tag=True):
    """Find and lease the longest cached prefix of a prompt; prefill gets Matched."""

    row: int
    tokens: tuple[int, ...]


class Store(msgspec.Struct, frozen=True, tag=True):
    """Pages of `row` lie aside on the executor: indices `first_page` .. `last_page` - 1 of these tokens."""

    row: int
    tokens: tuple[int, ...]
    first_page: int
    last_page: int


class Unlease(msgspec.Struct, frozen=True, tag=True):
    """`row` no longer needs the pages it was given."""

    row: int


class PagesLost(msgspec.Struct, frozen=True, tag=True):
    """The executor does not have these pages: forget them."""

    pages: tuple[int, ...]


class Reclaim(msgspec.Struct, frozen=True, tag=True):
    """Free at least so many bytes of pages that nobody leases, oldest first."""

    bytes: int


CacheStoreMessage = Match | Store | Unlease | PagesLost | Reclaim
