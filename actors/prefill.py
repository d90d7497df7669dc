"""The prefill actor: the message loop around `PrefillCore`."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, assert_never

from ..runtime.actor import Actor, InboxFull
from ..runtime.errors import ActorDied
from ..runtime.messages.prefill import (
    Admitted,
    CancelRows,
    ChunksDone,
    DecodeLoad,
    Matched,
    PrefillMessage,
    Restoring,
    SetChunkLine,
    StorePressure,
    Tick,
)
from .delivery import deliver

if TYPE_CHECKING:
    from ..runtime.actor import Ref
    from ..runtime.clock import Clock
    from ..runtime.messages.admission import AdmissionMessage
    from ..runtime.messages.cache_store import CacheStoreMessage
    from ..runtime.messages.decode import DecodeMessage
    from .prefill_core import PrefillCore

logger = logging.getLogger(__name__)

SOONEST_S = 0.001


class PrefillActor(Actor[PrefillMessage]):
    """Owns admitted requests until their prompts are computed."""

    admission: Ref[AdmissionMessage]
    decode: Ref[DecodeMessage]
    cache_store: Ref[CacheStoreMessage]

    def __init__(self, core: PrefillCore, *, inbox: int, clock: Clock) -> None:
        super().__init__("prefill", inbox=inbox, clock=clock)
        self.core = core
        self._again: asyncio.TimerHandle | None = None
        if core.peer is not None:
            core.peer.wake = self._look_again

    def handle(self, message: PrefillMessage) -> None:
        """See messages/prefill.py."""
        core = self.core
        match message:
            case ChunksDone():
                core.done(message)
            case Admitted():
                core.admit(message.rows, message.chunk_room_bytes)
            case Matched():
                core.matched(message)
            case Restoring():
                core.restoring(message.row)
            case StorePressure():
                core.stores(full=message.full)
            case CancelRows():
                core.cancel(message.rows, timeout=message.timeout)
            case DecodeLoad():
                core.load(message.decoding_rows)
            case SetChunkLine():
                core.set_line(message.line_bytes)
            case Tick():
                core.expire()
            case _:
                assert_never(message)

    def settle(self) -> None:
        """Choose the next chunks and send all messages; the cache-store's first, so that new pages can be matched."""
        core = self.core
        core.settle()
        deliver(core.to_cache, self.cache_store)
        deliver(core.to_decode, self.decode)
        deliver(core.to_admission, self.admission)
        if core.peer is not None:
            self._come_back(core.peer.wait_s(self.clock.now()))

    def _come_back(self, wait_s: float | None) -> None:
        """Look again when the turn to run a chunk may have come."""
        if self._again is not None:
            self._again.cancel()
        loop = asyncio.get_running_loop()
        self._again = None if wait_s is None else loop.call_later(max(wait_s, SOONEST_S), self._look_again)

    def _look_again(self) -> None:
        try:
            self.ref.tell(Tick())
        except (ActorDied, InboxFull) as error:  # what fills the inbox has it look again as well
            logger.debug("prefill does not look again: %s", error)

    def on_death(self, error: ActorDied) -> None:
        """Every row being computed ends with the error."""
        self.core.fail_all(error)
