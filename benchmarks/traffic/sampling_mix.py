"""Which sampling parameters requests bring: one kind, or several by weight."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..prompts import sampling_fields

if TYPE_CHECKING:
    import random

    from ..prompts import Sampling

KINDS = ("greedy", "mixed", "unseeded")


class Share(msgspec.Struct, frozen=True):
    """A kind of `prompts.sampling_fields`, or fields as they stand, and how often it comes."""

    kind: str
    weight: float
    fields: dict[str, Any] | None = None


class SamplingMix(msgspec.Struct, frozen=True):
    """Draws a request's sampling parameters."""

    shares: tuple[Share, ...] = (Share("greedy", 1.0),)

    def draw(self, number: int, rng: random.Random) -> dict[str, Any]:
        """Fields of request `number`."""
        (share,) = rng.choices(self.shares, [share.weight for share in self.shares])
        if share.fields is not None:
            return dict(share.fields)
        return sampling_fields(number, cast("Sampling", share.kind))


def parse_mix(text: str) -> SamplingMix:
    """A mix of "greedy", "greedy:1,mixed:3", or a JSON object such as {"temperature": 0.7}. Raises ValueError."""
    if text.lstrip().startswith("{"):
        return SamplingMix((Share("given", 1.0, _fields(text)),))
    shares = []
    for part in text.split(","):
        kind, _, weight = part.partition(":")
        if kind not in KINDS:
            raise ValueError(f"unknown sampling {kind!r}; known: {', '.join(KINDS)}, or a JSON object")
        shares.append(Share(kind, float(weight or 1)))
    if not all(share.weight >= 0 for share in shares) or not any(share.weight > 0 for share in shares):
        raise ValueError(f"{text}: weights are not negative, and one is above zero")
    return SamplingMix(tuple(shares))


def _fields(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--sampling is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("--sampling takes a JSON object")
    return fields
