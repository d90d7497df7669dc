"""Says why a long prompt was not found, when something like it was stored: numbers at INFO, token ids at DEBUG."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from ..runtime.prefix_page import KEY_BYTES, common_bytes, token_key

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

REMEMBERED = 4
MISSED_TOKENS = 4096


class MissLog:
    """The latest stored sequences, to compare prompts with. Owned by the cache-store's core.

    Args:
        page_tokens: tokens of a page; less in common is no surprise.
        missed_tokens: a prompt is looked at when it must compute so many.
    """

    def __init__(self, page_tokens: int, missed_tokens: int = MISSED_TOKENS) -> None:
        self._page_tokens = page_tokens
        self._missed_tokens = missed_tokens
        self._stored: deque[tuple[str, Sequence[int]]] = deque(maxlen=REMEMBERED)

    def stored(self, tokens: Sequence[int], namespace: str) -> None:
        """A sequence was stored; one that continues the latest replaces it."""
        if self._stored and self._stored[-1][0] == namespace:
            latest = self._stored[-1][1]
            if tokens[: len(latest)] == latest:
                self._stored.pop()
        self._stored.append((namespace, tokens))

    def look(self, tokens: Sequence[int], namespace: str, found: int) -> None:
        """A prompt was looked up and `found` of its tokens were there."""
        if len(tokens) - 1 - found < self._missed_tokens:
            return
        key = token_key(tokens)
        commons = [common_bytes(key, token_key(seen)) // KEY_BYTES for ns, seen in self._stored if ns == namespace]
        common = max(commons, default=0)
        if common < self._page_tokens or common < found + self._page_tokens:
            if common >= self._page_tokens:
                logger.info(
                    "prefix cache: %d of %d prompt tokens are computed again; they part from the closest of the last "
                    "%d stored sequences after %d tokens, %d of which were found",
                    len(tokens) - 1 - found, len(tokens), len(self._stored), common, found,
                )  # fmt: skip
                logger.debug("prefix cache: tokens around the parting: %s", tokens[max(0, common - 4) : common + 4])
            return
        logger.info(
            "prefix cache: %d of %d prompt tokens are computed again although %d were stored lately (%d found): their "
            "pages were evicted, or no checkpoint lies nearer",
            len(tokens) - 1 - found, len(tokens), common, found,
        )  # fmt: skip
