"""One measured case of a micro-benchmark beside its floor."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table.

    Attributes:
        part: which micro-benchmark.
        case: what varies, in words.
        measured_s: the best of several rounds' medians: other work on the machine only adds.
        floor_s: what physics, or one bare call, would take on this machine.
        floor: how the floor was worked out.
        skipped: why nothing was measured; the times mean nothing then.
    """

    part: str
    case: str
    measured_s: float = 0.0
    floor_s: float = 0.0
    floor: str = ""
    skipped: str = ""

    @property
    def times_floor(self) -> float | None:
        """How many times the floor it takes; None without a floor."""
        return self.measured_s / self.floor_s if self.floor_s > 0 and not self.skipped else None


def best_s(work: Callable[[], object], *, repeats: int, rounds: int = 3, inner: int = 1) -> float:
    """Seconds of one call of `work`: the least, over rounds, of the median of `repeats` timings of `inner` calls."""
    work()
    medians = []
    for _ in range(rounds):
        times = []
        for _ in range(repeats):
            began_s = time.perf_counter()
            for _ in range(inner):
                work()
            times.append((time.perf_counter() - began_s) / inner)
        medians.append(sorted(times)[len(times) // 2])
    return min(medians)


def extra_s(plain: Callable[[], object], more: Callable[[], object], repeats: int) -> float:
    """Seconds that `more` takes beyond `plain`: the median over pairs timed one after the other, at least 0."""
    differences = []
    for _ in range(max(3, repeats) * 3):
        began_s = time.perf_counter()
        plain()
        middle_s = time.perf_counter()
        more()
        differences.append(time.perf_counter() - middle_s - (middle_s - began_s))
    return max(0.0, sorted(differences)[len(differences) // 2])


def least_s(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the quickest call of `work`, after one that does not count."""
    work()
    times = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return min(times)
