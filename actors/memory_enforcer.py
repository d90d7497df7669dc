"""The memory-enforcer: looks at memory once a second and keeps the process under its lines (see memory_limits.py).

Over the dynamic line it first empties MLX's buffer pool, then gives up cached prefixes and holds admissions; they go on
again below RESUME_SHARE of it, so that the two do not alternate. What is still over the stable line when that has been
done is taken from the youngest row, one a look. It alone sets MLX's own limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import msgspec

from ..runtime.actor import Actor
from ..runtime.memory_probe import container_bytes, footprint_bytes, machine_bytes
from ..runtime.messages.admission import PauseAdmission, SetMemoryLine
from ..runtime.messages.cache_store import Reclaim
from ..runtime.messages.decode import Preempt
from ..runtime.messages.executor import SampleMemory, SetMemoryLimit
from ..runtime.messages.memory_enforcer import MemoryEnforcerMessage, MemorySample, Tick
from ..runtime.messages.prefill import SetChunkLine
from .memory_limits import RESUME_SHARE, Limits, Machine, derive_limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..runtime.actor import Ref
    from ..runtime.clock import Clock
    from ..runtime.engine_protocol import EngineFacts
    from ..runtime.messages.admission import AdmissionMessage
    from ..runtime.messages.cache_store import CacheStoreMessage
    from ..runtime.messages.decode import DecodeMessage
    from ..runtime.messages.executor import ExecutorMessage
    from ..runtime.messages.prefill import PrefillMessage
    from .memory_limits import MemoryTier

SAMPLE_INTERVAL_S = 1.0
LINE_STEP_SHARE = 0.01
"""Changes of the line that are smaller than this share of it are not passed on."""


class MemoryDecision(msgspec.Struct, frozen=True):
    """What to do about a sample.

    Attributes:
        pause: reason to hold admissions; None lets them go on.
        reclaim_bytes: bytes of cached prefixes to give up.
        clear_pool: empty MLX's buffer pool.
        preempt: reason to put a row back; None leaves all at work.
    """

    pause: str | None = None
    reclaim_bytes: int = 0
    clear_pool: bool = False
    preempt: str | None = None


class MemoryPolicy:
    """The decision core. Owned by the memory-enforcer.

    Args:
        limits: the lines; replaced as they move.
        unified: whether the process's footprint counts, as it does where device and programs share one memory.
    """

    def __init__(self, limits: Limits, *, unified: bool = True) -> None:
        self.limits = limits
        self.paused = False
        self._unified = unified

    def used_bytes(self, sample: MemorySample, footprint_bytes: int) -> int:
        """What counts against the lines, MLX's pool included."""
        used = sample.active_bytes + sample.pool_bytes
        return max(used, footprint_bytes) if self._unified else used

    def decide(self, sample: MemorySample, footprint_bytes: int) -> MemoryDecision:
        """Judge MLX's counters and the process's footprint, whichever is larger; the pool is free for the asking."""
        limits, used = self.limits, self.used_bytes(sample, footprint_bytes)
        needed = used - sample.pool_bytes
        resume = int(limits.dynamic_bytes * RESUME_SHARE)
        clear_pool = used > limits.dynamic_bytes and sample.pool_bytes > 0
        was_paused = self.paused
        if needed > limits.dynamic_bytes:
            self.paused = True
        elif needed <= resume:
            self.paused = False
        if not self.paused:
            return MemoryDecision(clear_pool=clear_pool)
        reason = (
            f"{needed >> 20} MiB in use, the limit is {limits.dynamic_bytes >> 20} MiB ({limits.binding}): "
            f"{limits.remedy}"
        )
        over = was_paused and needed > limits.abort_bytes
        return MemoryDecision(reason, needed - resume, clear_pool, reason if over else None)


class MemoryEnforcerActor(Actor[MemoryEnforcerMessage]):
    """Owns limits and samples.

    Args:
        facts: what the engine said of its memory.
        tier: how much of the machine is ours.
        limit_bytes: the user's ceiling, instead of the tier's.
        footprint: bytes of the process; psutil's unless a test brings another.
        machine: memory of the machine, without the device's; psutil's unless a test brings another.

    Attributes:
        sample: MLX's counters as last read.
        footprint_bytes: of the process, as last read.
        base_bytes: what counted against the lines before anybody was served.
    """

    admission: Ref[AdmissionMessage]
    cache_store: Ref[CacheStoreMessage]
    prefill: Ref[PrefillMessage]
    decode: Ref[DecodeMessage]
    executor: Ref[ExecutorMessage]

    def __init__(
        self,
        facts: EngineFacts,
        tier: MemoryTier,
        limit_bytes: int | None,
        *,
        inbox: int,
        clock: Clock,
        footprint: Callable[[], int] | None = None,
        machine: Callable[[], Machine] | None = None,
    ) -> None:
        super().__init__("memory-enforcer", inbox=inbox, clock=clock)
        self.sample = MemorySample(facts.base_bytes, 0, 0, clock.now())
        self._facts = facts
        self._tier: MemoryTier = tier
        self._limit_bytes = limit_bytes
        self._footprint = footprint or footprint_bytes
        self._machine = machine or _machine
        self.footprint_bytes = self._footprint()
        self.policy = MemoryPolicy(self._read_limits(), unified=facts.unified)
        self.base_bytes = self.policy.used_bytes(self.sample, self.footprint_bytes)
        self._line_bytes = self.policy.limits.admission_bytes
        self._asked = False
        self._cleared = False
        self._limited = False
        self._sampled_s: float | None = None
        self._told: str | None = None

    @property
    def limits(self) -> Limits:
        """The lines as last derived."""
        return self.policy.limits

    def on_device(self, line_bytes: int) -> int:
        """A line in bytes that MLX counts: what else the process holds is not among them."""
        return line_bytes - (self.base_bytes - self._facts.base_bytes)

    def handle(self, message: MemoryEnforcerMessage) -> None:
        """See messages/memory_enforcer.py."""
        match message:
            case Tick():
                self._tick()
            case MemorySample():
                self._asked = False
                self.sample = message
                self.footprint_bytes = self._footprint()
                self._act(self.policy.decide(message, self.footprint_bytes))
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
        self._follow_machine()
        self.executor.tell(SampleMemory())

    def _follow_machine(self) -> None:
        """Derive the lines anew, and pass on one that has moved."""
        limits = self.policy.limits = self._read_limits()
        if not self._limited:
            self._limited = True
            self.executor.tell(SetMemoryLimit(limits.abort_bytes))
        line = limits.admission_bytes
        if abs(line - self._line_bytes) > self._line_bytes * LINE_STEP_SHARE:
            self._line_bytes = line
            self.admission.tell(SetMemoryLine(line))
            self.prefill.tell(SetChunkLine(self.on_device(line)))

    def _read_limits(self) -> Limits:
        machine = msgspec.structs.replace(
            self._machine(), device_bytes=self._facts.device_bytes or None, unified=self._facts.unified
        )
        return derive_limits(machine, self._tier, self._limit_bytes, self.footprint_bytes)

    def _act(self, decision: MemoryDecision) -> None:
        if decision.reclaim_bytes:
            self.cache_store.tell(Reclaim(decision.reclaim_bytes))
        if (decision.pause is None) != (self._told is None):
            self.admission.tell(PauseAdmission(decision.pause))
            self._told = decision.pause
        if decision.preempt is not None:
            self.decode.tell(Preempt(decision.preempt))
        if decision.clear_pool and not self._cleared:  # at once, and look again; then not before the next tick
            self._asked = self._cleared = True
            self.executor.tell(SampleMemory(clear_pool=True))


def _machine() -> Machine:
    total, available = machine_bytes()
    return Machine(total_bytes=total, available_bytes=available, container_bytes=container_bytes())
