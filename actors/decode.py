"""The decode actor: the message loop around `DecodeCore`."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from ..runtime.actor import Actor
from ..runtime.errors import EngineFailed
from ..runtime.messages.decode import (
    CancelRunning,
    ChunksResult,
    DecodeMessage,
    ExecutorDied,
    Offer,
    Preempt,
    Ready,
    RowsFailed,
    StepResult,
    Withdraw,
)
from ..runtime.messages.prefill import DecodeLoad
from .delivery import deliver

if TYPE_CHECKING:
    from ..runtime.actor import Ref
    from ..runtime.clock import Clock
    from ..runtime.errors import ActorDied
    from ..runtime.messages.admission import AdmissionMessage
    from ..runtime.messages.cache_store import CacheStoreMessage
    from ..runtime.messages.executor import ExecutorMessage
    from ..runtime.messages.prefill import PrefillMessage
    from .decode_core import DecodeCore


class DecodeActor(Actor[DecodeMessage]):
    """Owns the running rows and the step plan."""

    admission: Ref[AdmissionMessage]
    prefill: Ref[PrefillMessage]
    executor: Ref[ExecutorMessage]
    cache_store: Ref[CacheStoreMessage]

    def __init__(self, core: DecodeCore, *, inbox: int, clock: Clock) -> None:
        super().__init__("decode", inbox=inbox, clock=clock)
        self.core = core
        self._loaded = False

    def handle(self, message: DecodeMessage) -> None:
        """See messages/decode.py."""
        core = self.core
        match message:
            case StepResult():
                core.commit(message)
            case ChunksResult():
                core.chunks_done(message)
            case Offer():
                core.offer(message)
            case Ready():
                core.ready(message.rows)
                self._loaded = True  # prefill has counted them; it must hear if they end at once
            case RowsFailed():
                core.rows_failed(message)
            case CancelRunning():
                core.cancel(message.rows, timeout=message.timeout)
            case Preempt():
                core.preempt(message.reason, last=message.last)
            case Withdraw():
                core.withdraw(message.rows)
            case ExecutorDied():
                core.fail_all(EngineFailed(message.error))
            case _:
                assert_never(message)

    def settle(self) -> None:
        """Send the next plans first, since the device may be waiting, then all else."""
        core = self.core
        while (plan := core.plan()) is not None:
            self.executor.tell(plan)
        deliver(core.to_cache, self.cache_store)
        deliver(core.to_admission, self.admission)
        deliver(core.to_prefill, self.prefill)
        loaded = core.decoding > 0
        if loaded != self._loaded:
            self._loaded = loaded
            self.prefill.tell(DecodeLoad(core.decoding))

    def on_death(self, error: ActorDied) -> None:
        """Every running row ends with the error."""
        self.core.fail_all(error)
