"""Where tests may let the disk fail, or end the process."""

from __future__ import annotations

from typing import Literal, Protocol

Point = Literal["open", "write", "fsync", "rename", "row", "read", "index"]


class Faults(Protocol):
    """Called at each point of a write or read. May raise what the system would, or not come back."""

    def reached(self, point: Point, /) -> None:
        """The work is about to do this."""
        ...


class _NoFaults:
    def reached(self, point: Point, /) -> None:
        """Nothing happens."""


NO_FAULTS: Faults = _NoFaults()
