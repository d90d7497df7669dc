"""Which models have to go: pure functions over slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .slot import Slot


def least_used(slots: Iterable[Slot], asking: Slot | None = None) -> Slot | None:
    """The one to unload for another: of those that nobody uses the one used longest ago; None when all are in use."""
    idle = [slot for slot in slots if slot.evictable and slot is not asking]
    return min(idle, key=lambda slot: slot.used_s, default=None)


def expired(slots: Iterable[Slot], ttl_s: float | None, now_s: float) -> list[Slot]:
    """Those that nobody has used for their time to live.

    Args:
        slots: all of them.
        ttl_s: of models that have none of their own; None never ends.
        now_s: the time.
    """
    found = []
    for slot in slots:
        own_s = slot.model.ttl_s if slot.model.ttl_s is not None else ttl_s
        if own_s is not None and slot.evictable and now_s - slot.used_s >= own_s:
            found.append(slot)
    return found
