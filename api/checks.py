"""Ranges of single fields: each check names the field it refuses.

Clients' ranges are narrower than the runtime's, which serves embedders too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..runtime.generation import MAX_STOPS
from .errors import invalid

if TYPE_CHECKING:
    from .wire.fields import Number, Prompts

MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_BIASED_TOKENS = 1024
MAX_TOKEN_ID = 2**31 - 1
_MAX_KEY_CHARACTERS = 10


def whole(value: Number | None, param: str, low: int, high: int) -> int | None:
    """An integer in [low, high], or None; `1.0` counts as one."""
    if value is None:
        return None
    if isinstance(value, float) and not value.is_integer():
        raise invalid(f"{param} must be an integer, got {value}", param=param)
    number = int(value)
    if not low <= number <= high:
        raise invalid(f"{param} must be in [{low}, {high}], got {_shown(value)}", param=param)
    return number


def real(value: Number | None, param: str, low: float, high: float) -> float | None:
    """A finite number in [low, high], or None."""
    if value is None:
        return None
    if not low <= value <= high:
        raise invalid(f"{param} must be in [{low:g}, {high:g}], got {_shown(value)}", param=param)
    return float(value)


def stops(value: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings; empty ones, which would stop at once, are what some clients send for none."""
    found = (value,) if isinstance(value, str) else tuple(value or ())
    found = tuple(dict.fromkeys(stop for stop in found if stop))
    if len(found) > MAX_STOPS:
        raise invalid(f"stop names more than {MAX_STOPS} strings", param="stop")
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in found):
        raise invalid(f"a stop string is longer than {MAX_STOP_CHARACTERS} characters", param="stop")
    return found


def stop_token_ids(value: list[Number] | None) -> tuple[int, ...]:
    """Token ids that end the output."""
    if value is not None and len(value) > MAX_STOP_TOKEN_IDS:
        raise invalid(f"stop_token_ids names more than {MAX_STOP_TOKEN_IDS} ids", param="stop_token_ids")
    return token_ids(value or [], "stop_token_ids")


def token_ids(value: list[Number], param: str) -> tuple[int, ...]:
    """Token ids; the runtime checks them against the vocabulary."""
    ids = []
    for item in value:
        number = whole(item, param, 0, MAX_TOKEN_ID)
        if number is not None:
            ids.append(number)
    return tuple(ids)


def prompts(value: Prompts | None, most: int, param: str) -> list[str | tuple[int, ...]]:
    """One or several prompts, each a text or token ids."""
    if value is None or value == []:
        raise invalid(f"{param} is required and must not be empty", param=param, code="missing_parameter")
    if isinstance(value, str):
        return [value]
    if all(isinstance(item, int | float) for item in value):
        return [token_ids([item for item in value if isinstance(item, int | float)], param)]
    if len(value) > most:
        raise invalid(f"{param} holds more than {most} prompts", param=param, code="too_many_prompts")
    found: list[str | tuple[int, ...]] = []
    for item in value:
        if isinstance(item, int | float):
            raise invalid(f"{param} mixes token ids with other prompts", param=param, code="invalid_type")
        found.append(item if isinstance(item, str) else token_ids(item, param))
    if any(prompt == () for prompt in found):
        raise invalid(f"{param} holds an empty list of token ids", param=param)
    return found


def logit_bias(value: dict[str, Number] | None) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias, from an object whose keys are ids in decimal."""
    if not value:
        return ()
    if len(value) > MAX_BIASED_TOKENS:
        raise invalid(f"logit_bias names more than {MAX_BIASED_TOKENS} tokens", param="logit_bias")
    return tuple((_bias_key(key), real(bias, "logit_bias", -100, 100) or 0.0) for key, bias in value.items())


def _bias_key(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= _MAX_KEY_CHARACTERS and int(key) <= MAX_TOKEN_ID):
        raise invalid(f"logit_bias keys must be token ids, got {key[:32]!r}", param="logit_bias")
    return int(key)


def _shown(value: Number) -> str:
    """A number short enough for a message: clients may send thousands of digits."""
    if isinstance(value, float):
        return f"{value:g}" if math.isfinite(value) else str(value)
    return str(value) if abs(value) < 10**18 else "a number that large"
