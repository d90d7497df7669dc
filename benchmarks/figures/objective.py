"""The service objective of goodput: a request counts when it meets every bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from .outcome import Outcome


class Objective(msgspec.Struct, frozen=True):
    """Upper bounds in seconds; None is no bound.

    Attributes:
        ttft: first token, from the intended time.
        tpot: mean time of a token after the first.
        gap: longest pause between arrivals of text.
        e2e: the whole request.
    """

    ttft: float | None = 1.0
    tpot: float | None = 0.1
    gap: float | None = None
    e2e: float | None = None

    def met_by(self, outcome: Outcome) -> bool:
        """Whether a request ended well and within all bounds. One that left early is not judged: it is not met."""
        if not outcome.good:
            return False
        measured = {
            "ttft": outcome.first_token_s,
            "tpot": outcome.per_token_s,
            "gap": max(outcome.gaps_s(), default=0.0),
            "e2e": outcome.whole_s,
        }
        bounds = ((measured[name], getattr(self, name)) for name in self.__struct_fields__)
        return all(bound is None or value is None or value <= bound for value, bound in bounds)

    def __str__(self) -> str:
        bounds = [(name, getattr(self, name)) for name in self.__struct_fields__]
        return ", ".join(f"{name} <= {bound:g} s" for name, bound in bounds if bound is not None) or "no bounds"


def parse_objective(text: str) -> Objective:
    """Bounds of "ttft=0.5,tpot=0.05" in seconds; what is not named has none. Raises ValueError."""
    names = Objective.__struct_fields__
    bounds: dict[str, float | None] = dict.fromkeys(names)
    for part in text.split(","):
        name, separator, value = part.strip().partition("=")
        if name not in names or not separator:
            raise ValueError(f"{part!r} is not NAME=SECONDS with one of {', '.join(names)}")
        bounds[name] = float(value)
        if not float(value) > 0:
            raise ValueError(f"{part}: a bound is above 0 s")
    return Objective(**bounds)
