"""The admission actor: the message loop around `AdmissionCore`."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from ..runtime.actor import Actor, Reply
from ..runtime.messages.admission import (
    AdmissionMessage,
    CacheHolds,
    Cancel,
    Drain,
    PauseAdmission,
    Requeue,
    RowDone,
    SetMemoryLine,
    Submit,
    Tick,
)
from .delivery import deliver

if TYPE_CHECKING:
    from ..runtime.actor import Ref
    from ..runtime.clock import Clock
    from ..runtime.errors import ActorDied
    from ..runtime.messages.cache_store import CacheStoreMessage
    from ..runtime.messages.prefill import PrefillMessage
    from .admission_core import AdmissionCore


class AdmissionActor(Actor[AdmissionMessage]):
    """Owns the waiting queue and the list of live rows."""

    cache_store: Ref[CacheStoreMessage]
    prefill: Ref[PrefillMessage]

    def __init__(self, core: AdmissionCore, *, inbox: int, clock: Clock) -> None:
        super().__init__("admission", inbox=inbox, clock=clock)
        self.core = core
        self._drains: list[Reply[None]] = []

    def handle(self, message: AdmissionMessage) -> None:
        """See messages/admission.py."""
        core = self.core
        match message:
            case Submit():
                error = core.submit(message.rows)
                if error is None:
                    message.reply.send(None)
                else:
                    message.reply.fail(error)
            case RowDone():
                core.row_done(message.row)
            case Requeue():
                core.requeue(message.rows)
            case Cancel():
                core.cancel(message.request_id)
            case PauseAdmission() | SetMemoryLine() | CacheHolds():
                self._memory_news(message)
            case Drain():
                core.draining = True
                self._drains.append(message.reply)
            case Tick():
                core.expire()
            case _:
                assert_never(message)

    def _memory_news(self, message: PauseAdmission | SetMemoryLine | CacheHolds) -> None:
        core = self.core
        match message:
            case PauseAdmission():
                core.pause(message.reason)
            case SetMemoryLine():
                core.set_memory_line(message.line_bytes)
            case CacheHolds():
                core.cache_holds(message)
            case _:
                assert_never(message)

    def settle(self) -> None:
        """Let in who may go in, and answer a drain when the last row has ended."""
        self.core.settle()
        deliver(self.core.to_cache, self.cache_store)
        deliver(self.core.to_prefill, self.prefill)
        if self._drains and self.core.idle:
            for reply in self._drains:
                reply.send(None)
            self._drains.clear()

    def on_death(self, error: ActorDied) -> None:
        """Every live row ends with the error, wherever it is, and so does a drain."""
        self.core.fail_all(error)
        for reply in self._drains:
            reply.fail(error)
        self._drains.clear()
