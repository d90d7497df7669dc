"""A prefill core at its desk, with its neighbours' messages in the hands of the test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_troupe.actors.prefill_core import PrefillCore
from mlx_troupe.actors.prefill_cost import ChunkCost
from mlx_troupe.actors.prefill_keep import KeepRules
from mlx_troupe.actors.prefill_policy import PrefillPolicy
from mlx_troupe.runtime.clock import ManualClock
from mlx_troupe.runtime.messages.cache_store import Match
from mlx_troupe.runtime.messages.decode import Offer
from mlx_troupe.runtime.messages.prefill import ChunkDone, ChunksDone, Matched
from mlx_troupe.runtime.request import Request, State

if TYPE_CHECKING:
    from mlx_troupe.runtime.messages.executor import Chunk
    from mlx_troupe.runtime.peers import Peer

PAGE = 4


class Desk:
    """A prefill core, and shorthands for what its neighbours say."""

    def __init__(
        self, *, page_tokens: int = PAGE, chunk_tokens: int = 8, token_s: float = 1e-3, peer: Peer | None = None
    ) -> None:
        self.clock = ManualClock()
        policy = PrefillPolicy(chunk_tokens=chunk_tokens)
        self.core = PrefillCore(policy, ChunkCost(token_s), keep=KeepRules(page_tokens), clock=self.clock, peer=peer)

    def admit(self, *rows: Request) -> None:
        for row in rows:
            row.move(State.ADMITTED)
        self.core.admit(rows)
        self.core.settle()

    def answer(self, row: int, pages: tuple[int, ...] = (), tokens: int = 0) -> None:
        """The cache-store's answer to the Match that must be waiting."""
        assert any(isinstance(message, Match) and message.row == row for message in self.core.to_cache)
        self.core.to_cache.clear()
        self.core.matched(Matched(row, pages, tokens))
        self.core.settle()

    def said(self, kind: type) -> list:
        """Take the messages of one kind to decode."""
        found = [message for message in self.core.to_decode if isinstance(message, kind)]
        self.core.to_decode[:] = [message for message in self.core.to_decode if not isinstance(message, kind)]
        return found

    def chunks(self) -> list[Chunk]:
        """The one offer that must be waiting."""
        (offer,) = self.said(Offer)
        return list(offer.chunks)

    def ran(self, *chunks: Chunk, seconds: float = 0.01, decoding: int = 0, **fault) -> None:
        """These chunks have run."""
        tokens = 0 if fault else None
        done = tuple(
            ChunkDone(chunk.row, len(chunk.tokens) if tokens is None else 0, chunk.start, seconds, **fault)
            for chunk in chunks
        )
        self.core.done(ChunksDone(done, decoding))
        self.core.settle()
