"""How much memory may be used: from the machine, the setting, and what other programs leave. Pure functions.

Two ceilings. The stable one (a share of the machine, the container's limit, the device, the user's bytes: the smallest)
does not move; beyond it running work is taken away. The dynamic one also follows what other programs leave free; new
work is measured against it, so that a passing dip never ends a request that fits.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MemoryTier = Literal["safe", "balanced", "aggressive"]

TIER_SHARES: dict[MemoryTier, float] = {"safe": 0.70, "balanced": 0.80, "aggressive": 0.90}
CONTAINER_SHARE = 0.95
RESERVE_SHARE = 0.02
"""Of the machine, left to other programs."""
ADMISSION_SHARE = 0.90
SOFT_SHARE = 0.85
RESUME_SHARE = 0.95
PREEMPT_SHARE = 0.95

_REMEDIES = {
    "memory_limit_bytes": "raise memory_limit_bytes or send less context",
    "memory tier": "choose a higher memory tier or send less context",
    "container limit": "raise the container's memory limit or send less context",
    "device": "use a smaller or quantised model, or send less context",
    "other programs": "close other programs or try later",
}


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Memory as the operating system and the device tell it, in bytes; None where there is no such limit.

    Attributes:
        total_bytes: of the machine.
        available_bytes: that programs could still have.
        container_bytes: the control group's limit.
        device_bytes: what the device recommends to use at most.
        unified: whether device and programs share one memory.
    """

    total_bytes: int
    available_bytes: int
    container_bytes: int | None = None
    device_bytes: int | None = None
    unified: bool = True


class Limits(msgspec.Struct, frozen=True):
    """The lines, in bytes of use by this process.

    Attributes:
        abort_bytes: the stable ceiling.
        dynamic_bytes: the moving one, never above it.
        binding: what sets the dynamic one.
        stable_binding: what sets the stable one.
    """

    abort_bytes: int
    dynamic_bytes: int
    binding: str
    stable_binding: str

    @property
    def soft_bytes(self) -> int:
        """Above it cached prefixes are given up."""
        return int(self.dynamic_bytes * SOFT_SHARE)

    @property
    def admission_bytes(self) -> int:
        """What admitted work may be planned to use: it leaves room for chunks that turn out dearer than thought."""
        return int(self.dynamic_bytes * ADMISSION_SHARE)

    @property
    def stable_admission_bytes(self) -> int:
        """The same if no other program ran: what does not fit below it never will."""
        return int(self.abort_bytes * ADMISSION_SHARE)

    @property
    def slack_bytes(self) -> int:
        """From what is planned with to the stable line."""
        return self.abort_bytes - self.stable_admission_bytes

    @property
    def preempt_bytes(self) -> int:
        """Above it the youngest row is put back to the queue."""
        return int(self.abort_bytes * PREEMPT_SHARE)

    @property
    def remedy(self) -> str:
        """What a user can do about the binding line."""
        return _REMEDIES[self.binding]

    @property
    def stable_remedy(self) -> str:
        """What a user can do about the stable line."""
        return _REMEDIES[self.stable_binding]


def derive_limits(machine: Machine, tier: MemoryTier, limit_bytes: int | None, own_bytes: int) -> Limits:
    """The lines now.

    Args:
        machine: as just read.
        tier: how much of the machine is ours.
        limit_bytes: the user's own ceiling, instead of the tier's.
        own_bytes: what this process uses now.
    """
    ceilings = {"container limit": machine.container_bytes, "device": machine.device_bytes}
    stable = {name: int(size * CONTAINER_SHARE) for name, size in ceilings.items() if size}
    if limit_bytes is not None:
        stable["memory_limit_bytes"] = limit_bytes
    elif machine.unified or not machine.device_bytes:
        stable["memory tier"] = int(machine.total_bytes * TIER_SHARES[tier])
    else:
        stable["memory tier"] = int(machine.device_bytes * TIER_SHARES[tier])
    name = min(stable, key=lambda one: stable[one])
    abort_bytes = stable[name]
    if not machine.unified:
        return Limits(abort_bytes, abort_bytes, name, name)
    left_bytes = own_bytes + machine.available_bytes - int(machine.total_bytes * RESERVE_SHARE)
    if left_bytes >= abort_bytes:
        return Limits(abort_bytes, abort_bytes, name, name)
    return Limits(abort_bytes, max(0, left_bytes), "other programs", name)
