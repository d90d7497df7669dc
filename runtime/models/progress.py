"""Progress of a download or a conversion, as plain values for whoever draws it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec


class Progress(msgspec.Struct, frozen=True):
    """One report.

    Attributes:
        stage: what is being done, in words: "download SmolLM2", "convert", "verify".
        done: units finished so far.
        total: units in all; None while unknown.
        unit: what is counted.
    """

    stage: str
    done: int
    total: int | None = None
    unit: Literal["bytes", "tensors"] = "bytes"


Report = Callable[[Progress], None]
"""Called on the thread that does the work, or on a download thread; it must not block."""


def ignore(progress: Progress) -> None:
    """The report of a caller that does not care."""
