"""How long prompts and answers are: distributions over tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import random


class Fixed(msgspec.Struct, frozen=True, tag="fixed"):
    """Always the same."""

    tokens: int

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return self.tokens


class LogUniform(msgspec.Struct, frozen=True, tag="loguniform"):
    """Between two bounds, every doubling as likely as any other."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return round(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))


class LogNormal(msgspec.Struct, frozen=True, tag="lognormal"):
    """What chats look like: a median, a long tail (`sigma` of the logarithm), cut at `longest`."""

    median: int
    sigma: float
    longest: int

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return max(1, min(self.longest, round(self.median * math.exp(rng.gauss(0.0, self.sigma)))))


Lengths = Fixed | LogUniform | LogNormal
TAIL_SIGMAS = 3
"""Where a log-normal is cut unless told otherwise."""


def parse_lengths(text: str) -> Lengths:
    """Lengths of "128", "loguniform:64-1024" or "lognormal:256,0.8" (median, sigma) and ",4096" (longest).

    Raises ValueError.
    """
    kind, separator, values = text.partition(":")
    if not separator:
        return Fixed(_tokens(text))
    if kind == "loguniform":
        low, _, high = values.partition("-")
        if _tokens(low) > _tokens(high):
            raise ValueError(f"{values}: the lower bound is above the upper")
        return LogUniform(_tokens(low), _tokens(high))
    if kind == "lognormal":
        parts = values.split(",")
        if len(parts) not in (2, 3):
            raise ValueError(f"{text!r} is not lognormal:MEDIAN,SIGMA or lognormal:MEDIAN,SIGMA,LONGEST")
        median, sigma = _tokens(parts[0]), float(parts[1])
        if not 0 <= sigma <= 5:
            raise ValueError(f"sigma is between 0 and 5, not {parts[1]}")
        longest = _tokens(parts[2]) if len(parts) == 3 else round(median * math.exp(TAIL_SIGMAS * sigma))
        return LogNormal(median, sigma, longest)
    raise ValueError(f"unknown lengths {kind!r}; known: N, loguniform:LOW-HIGH, lognormal:MEDIAN,SIGMA[,LONGEST]")


def _tokens(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of tokens") from None
    if value < 1:
        raise ValueError(f"a length is at least 1 token, not {value}")
    return value
