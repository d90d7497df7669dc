"""A token's way from the engine process to the HTTP process: into the turn's frame, and out of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mlx_troupe.runtime.events import TextDelta
from mlx_troupe.runtime.generation import Generation
from mlx_troupe.runtime.remote.outlets import Outbox, Outlet
from mlx_troupe.runtime.remote.session import Session
from mlx_troupe.runtime.remote.words import KnownWords

from .case import Case, best_s

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .machine import MachineRates

STREAMS = (1, 64)


def frame_cases(rates: MachineRates, repeats: int) -> Iterator[Case]:
    """One event of each stream, for each event. Floor: one Python call, and the bytes copied once."""
    for streams in STREAMS:
        out_s, in_s, size = asyncio.run(_measured(streams, repeats))
        floor_s = rates.call_s + size / streams / rates.host_bytes_s
        floor = f"one call and {size / streams:.0f} bytes copied"
        for part, seconds in (("frame out", out_s), ("frame in", in_s)):
            yield Case(
                part=part,
                case=f"an event, {streams} streams a turn",
                measured_s=seconds / streams,
                floor_s=floor_s,
                floor=floor,
            )


async def _measured(streams: int, repeats: int) -> tuple[float, float, int]:
    """Seconds to fill and encode a turn's frame, seconds to decode it and hand it out, and its bytes."""
    outbox = Outbox(lambda: None, ended=_ignore, broken=_ignore, failed=_ignore)
    outlets = [Outlet(number, outbox, choices=1, bound=64) for number in range(1, streams + 1)]
    for outlet in outlets:
        outlet.start(None)

    def fill() -> bytearray:
        for outlet in outlets:
            outlet.push(TextDelta(" word", (123_456,)))
        (frame,) = outbox.gather()
        return frame

    session = Session(KnownWords(), None, 64)
    mailboxes = [session.open(Generation(prompt=""), whole=False)[1].events for _ in range(streams)]
    frame = bytes(fill())

    def empty() -> None:
        session.link.data_received(frame)
        for mailbox in mailboxes:
            mailbox.clear()

    def only_clear() -> None:
        for mailbox in mailboxes:
            mailbox.clear()

    out_s = best_s(fill, repeats=repeats, inner=50)
    in_s = best_s(empty, repeats=repeats, inner=50) - best_s(only_clear, repeats=repeats, inner=50)
    session.link.connection_lost(None)
    return out_s, in_s, len(frame)


def _ignore(*_: object) -> None:
    """Nobody listens."""
