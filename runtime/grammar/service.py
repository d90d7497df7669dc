"""Compiles grammars off the event loop and keeps the latest ones.

Invariants (each has a test of its name):
- `compiling_is_bounded`: in size before it starts, in work by llguidance's limits, in time by `timeout_s`;
- `the_cache_is_bounded_by_bytes`: of what the grammars weigh, by a rough estimate from their text;
- `each_row_has_its_own_matcher`.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from ..errors import InvalidRequest
from ..text.worker_pool import WorkerPool
from .compiler import new_matcher, new_tokenizer
from .constraint import GrammarConstraint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llguidance import LLMatcher, LLTokenizer

    from .spec import Grammar

THREADS = 2
MAX_QUEUED = 256
COMPILE_TIMEOUT_S = 10.0
CACHE_BYTES = 64 << 20
_BASE_BYTES = 32 << 10
_BYTES_PER_CHARACTER = 64


class GrammarService:
    """Grammars of one served model. `constraints` belongs to the event loop; the rest is on its own threads.

    Args:
        token_bytes: gives every id's exact bytes; None when the tokenizer's tokens have none of their own.
        special: ids whose bytes are not text.
        end: ids that end the output.
        cache_bytes: what compiled grammars may weigh.
        timeout_s: longest a request waits for its grammar.
    """

    def __init__(
        self,
        token_bytes: Callable[[], Sequence[bytes] | None],
        special: frozenset[int],
        end: frozenset[int],
        *,
        cache_bytes: int = CACHE_BYTES,
        timeout_s: float = COMPILE_TIMEOUT_S,
    ) -> None:
        self.end = end
        self.cached_bytes = 0
        self._token_bytes = token_bytes
        self._special = special
        self._cache_bytes = cache_bytes
        self._timeout_s = timeout_s
        self._cache: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._pool: WorkerPool[None] | None = None

    async def constraints(self, grammar: Grammar, count: int) -> list[GrammarConstraint]:
        """One constraint for each of `count` rows.

        Raises:
            InvalidRequest: naming the field: too large, does not compile, matches nothing, takes too long, or the
                model's tokenizer cannot be constrained.
            Overloaded: too many grammars wait; NotReady when the service is closed.
        """
        if self._pool is None:
            self._pool = WorkerPool(lambda: None, threads=THREADS, max_queued=MAX_QUEUED, name="grammar")
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._pool.run(lambda _: self._make(grammar, count))
        except TimeoutError:
            raise grammar.refused(f"compiling it took more than {self._timeout_s:g} s") from None

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.close()

    def _make(self, grammar: Grammar, count: int) -> list[GrammarConstraint]:
        matcher = self._matcher(grammar)
        with self._lock:
            return [GrammarConstraint(matcher.deep_copy(), self.end) for _ in range(count)]

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        key = hashlib.sha256(f"{grammar.kind}\0{grammar.lenient}\0{grammar.text}".encode("utf-8", "replace")).digest()
        with self._lock:
            if (found := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return found[0]
        grammar.check()
        matcher = new_matcher(self._open_tokenizer(grammar), grammar)
        self._keep(key, matcher, _BASE_BYTES + _BYTES_PER_CHARACTER * len(grammar.text))
        return matcher

    def _keep(self, key: bytes, matcher: LLMatcher, size_bytes: int) -> None:
        with self._lock:
            if key in self._cache or size_bytes > self._cache_bytes:
                return
            self._cache[key] = (matcher, size_bytes)
            self.cached_bytes += size_bytes
            while self.cached_bytes > self._cache_bytes:
                self.cached_bytes -= self._cache.popitem(last=False)[1][1]

    def _open_tokenizer(self, grammar: Grammar) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                tokens = self._token_bytes()
                if tokens is None or not self.end:
                    why = "this model's tokenizer has no tokens of exact text" if self.end else "the model has no end"
                    raise InvalidRequest(f"output cannot be constrained: {why}", param=grammar.param)
                self._tokenizer = new_tokenizer(tokens, sorted(self._special), sorted(self.end))
            return self._tokenizer
