"""What several models count, together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..service import Statistics

if TYPE_CHECKING:
    from collections.abc import Sequence

S = TypeVar("S", bound=msgspec.Struct)

_OF_THE_PROCESS = frozenset({"memory_active_bytes", "memory_pool_bytes", "memory_peak_bytes", "last_step_age_s"})
NOTHING = Statistics(
    running=0, prefilling=0, waiting=0, steps=0, prompt_tokens=0, completion_tokens=0, finished={}
)  # fmt: skip


def total(parts: Sequence[Statistics]) -> Statistics:
    """The sum over models; of what the process has only once, the largest."""
    return _sum(parts) if parts else NOTHING


def _sum(parts: Sequence[S]) -> S:
    fields: dict[str, Any] = {
        name: _together(name, [getattr(part, name) for part in parts]) for name in parts[0].__struct_fields__
    }
    return type(parts[0])(**fields)


def _together(name: str, values: list[Any]) -> object:
    if name in _OF_THE_PROCESS:
        return max((value for value in values if value is not None), default=None)
    if isinstance(values[0], dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _together(key, [value[key] for value in values if key in value]) for key in keys}
    return _sum(values) if isinstance(values[0], msgspec.Struct) else sum(values)
