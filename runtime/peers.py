"""What the engines of one process tell each other: they share its memory and its device.

*Memory.* Each engine posts what it claims: its weights, its prefix cache's budget and what its admitted rows will need.
An engine plans below the line less the claims of the others, so that together they stay under it however many there
are. One that falls short asks the pool to unload models that nobody uses.

*Fairness.* While any engine decodes, chunks are contended: one engine at a time has the turn to run one, first come,
first served, and after a chunk that took t the next waits `fair_share` x t, which decode steps get. A turn ends by
itself after TURN_S, so that an engine that hangs holds nobody up.

A lone engine meets no rule: it never waits for a turn, and nobody's claims count. Owned by the event loop's thread,
except `SharedLimit`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

TURN_S = 2.5
"""Longest that an engine keeps a turn (as long as the reference takes a decode for alive)."""


class Landlord(Protocol):
    """Who gives engines room: the pool."""

    async def make_room(self, peer: Peer, size_bytes: int) -> None:
        """Wait until so much may be loaded, unloading what nobody uses. Raises TroupeError when it never may."""
        ...

    def evict_for(self, peer: Peer, size_bytes: int) -> bool:
        """Begin to unload what nobody uses; whether something is on its way out."""
        ...


class SharedLimit:
    """MLX's memory limit, which the process has only once: set by any engine, restored by the last. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: set[int] = set()
        self._old_bytes: int | None = None

    def hold(self, holder: object, set_limit: Callable[[int], int], limit_bytes: int) -> None:
        """Set the limit for an engine. `set_limit` returns the one before."""
        with self._lock:
            old_bytes = set_limit(limit_bytes)
            if not self._holders:
                self._old_bytes = old_bytes
            self._holders.add(id(holder))

    def let_go(self, holder: object, set_limit: Callable[[int], int]) -> None:
        """An engine ends."""
        with self._lock:
            if id(holder) not in self._holders:
                return
            self._holders.discard(id(holder))
            if not self._holders and self._old_bytes is not None:
                set_limit(self._old_bytes)


class Peer:
    """One engine as the others see it.

    Attributes:
        name: its model's.
        claim_bytes: what it holds and has promised to its rows.
        own_bytes: its weights.
        overhead_bytes: what the process holds that MLX does not count.
        line_bytes: what the process may be planned to use, as its enforcer sees it; None while it has none.
        rows: rows it has admitted.
        wake: called when it may have the turn now.
    """

    def __init__(self, board: Peers, name: str) -> None:
        self.name = name
        self.claim_bytes = 0
        self.own_bytes = 0
        self.overhead_bytes = 0
        self.line_bytes: Callable[[], int] | None = None
        self.rows = 0
        self.wake: Callable[[], None] | None = None
        self._board = board
        self._decoding = 0

    # --- memory ---------------------------------------------------------------------------------------------------

    @property
    def limit(self) -> SharedLimit:
        """MLX's memory limit."""
        return self._board.limit

    def others_bytes(self) -> int:
        """What the other engines claim."""
        return sum(peer.claim_bytes for peer in self._board.others(self))

    @property
    def others_loaded(self) -> bool:
        """Whether another engine has, or will have, weights in memory."""
        return any(peer.claim_bytes for peer in self._board.others(self))

    async def make_room(self, size_bytes: int) -> None:
        """Wait until the model may be loaded, and claim what it needs. Raises TroupeError when it never may."""
        landlord = self._board.landlord
        if landlord is not None:
            await landlord.make_room(self, size_bytes)
        self.claim_bytes = size_bytes

    def may_get(self, size_bytes: int) -> bool:
        """Have room made for a request; whether some may come, now that another engine ends or its rows do."""
        landlord = self._board.landlord
        leaving = landlord is not None and landlord.evict_for(self, size_bytes)
        return leaving or any(peer.rows for peer in self._board.others(self))

    # --- fairness -------------------------------------------------------------------------------------------------

    @property
    def decoding(self) -> int:
        """Rows that decode."""
        return self._decoding

    @decoding.setter
    def decoding(self, rows: int) -> None:
        ended = self._decoding > 0 and not rows
        self._decoding = rows
        if ended:
            self._board.wake_all()

    @property
    def others_decode(self) -> bool:
        """Whether another engine decodes now."""
        return any(peer.decoding for peer in self._board.others(self))

    @property
    def undisturbed(self) -> bool:
        """Whether no other engine works, so that what is measured now is this engine's own."""
        return not any(peer.rows or peer.decoding for peer in self._board.others(self))

    def take_turn(self, now_s: float) -> bool:
        """Whether a chunk may run now; if not, `wake` is called, or `wait_s` says when to ask again."""
        return self._board.take_turn(self, now_s)

    def end_turn(self, chunk_s: float, fair_share: float, now_s: float) -> None:
        """A chunk has run for `chunk_s`, or was dropped."""
        self._board.end_turn(self, chunk_s, fair_share, now_s)

    def give_up(self) -> None:
        """There is no chunk to run any more."""
        self._board.give_up(self)

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until asking for the turn again may help; None when it is not waited for."""
        return self._board.wait_s(self, now_s)

    def rest(self) -> None:
        """The engine stands still: it is loaded, ended, or started anew."""
        self.rows = 0
        self.wake = self.line_bytes = None
        self.decoding = 0
        self._board.forget(self)

    def leave(self) -> None:
        """The engine is gone."""
        self.rest()
        self.claim_bytes = 0
        self._board.remove(self)


class Peers:
    """The board. One a process, injected.

    Attributes:
        landlord: gives room; None where nobody does.
        limit: MLX's memory limit.
    """

    def __init__(self, landlord: Landlord | None = None) -> None:
        self.landlord = landlord
        self.limit = SharedLimit()
        self._peers: list[Peer] = []
        self._turn: Peer | None = None
        self._turn_until_s = 0.0
        self._last: Peer | None = None
        self._held_until_s = 0.0
        self._queue: list[Peer] = []

    def join(self, name: str) -> Peer:
        """Another engine."""
        peer = Peer(self, name)
        self._peers.append(peer)
        return peer

    def others(self, peer: Peer) -> list[Peer]:
        """All but one."""
        return [other for other in self._peers if other is not peer]

    def spare_bytes(self, peer: Peer) -> int | None:
        """What another model may claim; None while no engine knows the line."""
        lines = [other.line_bytes() for other in self._peers if other.line_bytes is not None]
        if not lines:
            return None
        overhead_bytes = max(other.overhead_bytes for other in self._peers)
        return min(lines) - overhead_bytes - sum(other.claim_bytes for other in self.others(peer))

    def remove(self, peer: Peer) -> None:
        """An engine is gone."""
        if peer in self._peers:
            self._peers.remove(peer)

    def take_turn(self, peer: Peer, now_s: float) -> bool:
        """See `Peer.take_turn`."""
        if not any(one.decoding for one in self._peers):
            self._leave_queue(peer)
            return True
        if peer not in self._queue:
            self._queue.append(peer)
        if self._queue[0] is not peer or self._blocked_s(peer, now_s) > 0.0:
            return False
        self._queue.remove(peer)
        self._turn, self._turn_until_s = peer, now_s + TURN_S
        return True

    def end_turn(self, peer: Peer, chunk_s: float, fair_share: float, now_s: float) -> None:
        """See `Peer.end_turn`."""
        if self._turn is not peer:
            return
        self._turn, self._last = None, peer
        self._held_until_s = now_s + fair_share * chunk_s
        self.wake_all()

    def give_up(self, peer: Peer) -> None:
        """See `Peer.give_up`."""
        self._leave_queue(peer)

    def wait_s(self, peer: Peer, now_s: float) -> float | None:
        """See `Peer.wait_s`."""
        if not self._queue or self._queue[0] is not peer:
            return None
        return max(0.0, self._blocked_s(peer, now_s))

    def forget(self, peer: Peer) -> None:
        """An engine stands still."""
        if self._turn is peer:
            self._turn = None
        if self._last is peer:
            self._last, self._held_until_s = None, 0.0
        self._leave_queue(peer)
        self.wake_all()

    def wake_all(self) -> None:
        """Have those that wait ask again."""
        for peer in list(self._queue):
            if peer.wake is not None:
                peer.wake()

    def _blocked_s(self, peer: Peer, now_s: float) -> float:
        turn_s = self._turn_until_s - now_s if self._turn not in (None, peer) else 0.0
        holds = peer is not self._last or peer.others_decode  # its own decode is paid by its own steps
        return max(turn_s, self._held_until_s - now_s if holds else 0.0)

    def _leave_queue(self, peer: Peer) -> None:
        if peer not in self._queue:
            return
        was_first = self._queue[0] is peer
        self._queue.remove(peer)
        if was_first and self._queue and (wake := self._queue[0].wake) is not None:
            wake()
