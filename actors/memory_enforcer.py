"""The memory-enforcer: watches memory once a second and keeps it under one hard limit.

Over the limit it first empties MLX's buffer pool, then gives up cached prefixes and holds admissions. They go on again
below RESUME_SHARE of the limit, so that the two do not alternate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import msgspec
import psutil

from ..runtime.actor import Actor
from ..runtime.messages.admission import PauseAdmission
from ..runtime.messages.cache_store import Reclaim
from ..runtime.messages.executor import SampleMemory
from ..runtime.messages.memory_enforcer import MemoryEnforcerMessage, MemorySample, Tick

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..runtime.actor import Ref
    from ..runtime.clock import Clock
    from ..runtime.messages.admission import AdmissionMessage
    from ..runtime.messages.cache_store import CacheStoreMessage
    from ..runtime.messages.executor import ExecutorMessage

MACHINE_SHARE = 0.85
"""Share of the machine's memory that is the limit when none is set."""
RESUME_SHARE = 0.95
SAMPLE_INTERVAL_S = 1.0


class MemoryDecision(msgspec.Struct, frozen=True):
    """What to do about a sample.

    Attributes:
        pause: reason to hold admissions; None lets them go on.
        reclaim_bytes: bytes of cached prefixes to give up.
        clear_pool: empty MLX's buffer pool.
    """

    pause: str | None = None
    reclaim_bytes: int = 0
    clear_pool: bool = False


class MemoryPolicy:
    """The decision core: one hard limit, with a lower line to go on at. Owned by the memory-enforcer.

    Args:
        limit_bytes: most that the process may use.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.paused = False

    def decide(self, sample: MemorySample, footprint_bytes: int) -> MemoryDecision:
        """Judge MLX's counters and the process's footprint, whichever is larger; the pool is free for the asking."""
        used_bytes = max(sample.active_bytes + sample.pool_bytes, footprint_bytes)
        needed_bytes = used_bytes - sample.pool_bytes
        resume_bytes = int(self.limit_bytes * RESUME_SHARE)
        clear_pool = used_bytes > self.limit_bytes and sample.pool_bytes > 0
        if needed_bytes > self.limit_bytes:
            self.paused = True
        elif needed_bytes <= resume_bytes:
            self.paused = False
        if not self.paused:
            return MemoryDecision(clear_pool=clear_pool)
        reason = f"{needed_bytes >> 20} MiB in use, the limit is {self.limit_bytes >> 20} MiB"
        return MemoryDecision(reason, needed_bytes - resume_bytes, clear_pool)


class MemoryEnforcerActor(Actor[MemoryEnforcerMessage]):
    """Owns limits and samples.

    Args:
        limit_bytes: hard limit; None is a share of the machine's memory.
        footprint: bytes of the process; psutil's unless a test brings another.

    Attributes:
        sample: MLX's counters as last read.
    """

    admission: Ref[AdmissionMessage]
    cache_store: Ref[CacheStoreMessage]
    executor: Ref[ExecutorMessage]

    def __init__(
        self,
        limit_bytes: int | None,
        *,
        inbox: int,
        clock: Clock,
        footprint: Callable[[], int] | None = None,
    ) -> None:
        super().__init__("memory-enforcer", inbox=inbox, clock=clock)
        self.policy = MemoryPolicy(limit_bytes or int(psutil.virtual_memory().total * MACHINE_SHARE))
        self.sample = MemorySample(0, 0, 0, 0.0)
        self._footprint = footprint or _footprint_bytes
        self._asked = False
        self._cleared = False
        self._sampled_s: float | None = None
        self._told: str | None = None

    def handle(self, message: MemoryEnforcerMessage) -> None:
        """See messages/memory_enforcer.py."""
        match message:
            case Tick():
                self._tick()
            case MemorySample():
                self._asked = False
                self.sample = message
                self._act(self.policy.decide(message, self._footprint()))
            case _:
                assert_never(message)

    def _tick(self) -> None:
        """Ask for a sample, if the last one has come (a busy thread is not asked twice) and is old enough."""
        now_s = self.clock.now()
        if self._asked or (self._sampled_s is not None and now_s - self._sampled_s < SAMPLE_INTERVAL_S):
            return
        self._asked = True
        self._sampled_s = now_s
        self._cleared = False
        self.executor.tell(SampleMemory())

    def _act(self, decision: MemoryDecision) -> None:
        if decision.reclaim_bytes:
            self.cache_store.tell(Reclaim(decision.reclaim_bytes))
        if (decision.pause is None) != (self._told is None):
            self.admission.tell(PauseAdmission(decision.pause))
            self._told = decision.pause
        if decision.clear_pool and not self._cleared:  # at once, and look again; then not before the next tick
            self._asked = self._cleared = True
            self.executor.tell(SampleMemory(clear_pool=True))


def _footprint_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
