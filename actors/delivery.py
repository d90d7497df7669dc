"""How decisions leave a core: it appends messages to one list a receiver, which its actor sends after each turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ..runtime.actor import Ref

M = TypeVar("M")


def deliver(outbox: list[M], receiver: Ref[M]) -> None:
    """Send what waits in an outbox, in order, and empty it."""
    if outbox:
        for message in outbox:
            receiver.tell(message)
        outbox.clear()
