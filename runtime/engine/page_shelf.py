"""The engine's pages: pieces put aside until the cache-store has named them, and those it has named.

Owned by the MLX thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..messages.executor import NO_PAGE
from .kv.page_bytes import from_blob, to_blob
from .kv.pages import form_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..page_blob import PageBlob
    from .kv.pages import PageForm, StoredPage

logger = logging.getLogger(__name__)


class PageShelf:
    """See the module.

    Args:
        page_tokens: tokens of a page.
        form: what pages from disk must look like; None takes any.
    """

    def __init__(self, page_tokens: int, form: PageForm | None = None) -> None:
        self._page_tokens = page_tokens
        self._form = form
        self._aside: dict[int, dict[int, StoredPage]] = {}
        self._pages: dict[int, StoredPage] = {}

    @property
    def page_ids(self) -> set[int]:
        """Pages that have a name."""
        return set(self._pages)

    @property
    def rows_aside(self) -> set[int]:
        """Rows with pieces that nobody has named yet."""
        return set(self._aside)

    def put_aside(self, row: int, end: int, take: Callable[[int, int], StoredPage]) -> None:
        """Keep the piece of `row` that ends at `end`. One that cannot be had is lost: a later miss and nothing else.

        Args:
            take: (low, high) to the piece.
        """
        try:
            page = take((end - 1) // self._page_tokens * self._page_tokens, end)
        except Exception:
            logger.exception("row %d: the piece up to %d could not be kept", row, end)
        else:
            self._aside.setdefault(row, {})[end] = page

    def discard(self, row: int, ends: Sequence[int]) -> None:
        """Free the pieces of `row` that end so: nobody will name them."""
        aside = self._aside.get(row, {})
        for end in ends:
            aside.pop(end, None)
        if not aside:
            self._aside.pop(row, None)

    def adopt(self, row: int, pages: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        """See `Engine.adopt`."""
        aside = self._aside.get(row, {})
        lost = []
        for end, page in pages:
            found = aside.pop(end, None)
            if page == NO_PAGE:
                continue
            if found is None:
                lost.append(page)
            else:
                self._pages[page] = found
        if not aside:
            self._aside.pop(row, None)
        return tuple(lost)

    def get(self, pages: Sequence[int]) -> list[StoredPage] | None:
        """Pages by id; None when one is gone."""
        found = [self._pages[page] for page in pages if page in self._pages]
        return found if len(found) == len(pages) else None

    def drop(self, pages: tuple[int, ...]) -> None:
        """See `Engine.drop`."""
        for page in pages:
            self._pages.pop(page, None)

    def read(self, page: int) -> PageBlob | None:
        """See `Engine.read_page`."""
        found = self._pages.get(page)
        return None if found is None else to_blob(found)

    def load(self, page: int, blob: PageBlob) -> None:
        """See `Engine.load_page`."""
        found = from_blob(blob)
        if self._form is not None and form_of(found) != self._form:
            raise ValueError("the page is not of this model's form")
        self._pages[page] = found

    def clear(self) -> None:
        """Free everything."""
        self._aside.clear()
        self._pages.clear()
