"""Formats of tool calls by name: mlx-lm's parsers, and the two that are ours."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

from ..text.dialect import HARMONY, ToolFormat
from .errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

NONE = "none"


def tool_format_names() -> Sequence[str]:
    """All names that `tool_format` knows."""
    from mlx_lm import tool_parsers

    return sorted({NONE, HARMONY, *(module.name for module in pkgutil.iter_modules(tool_parsers.__path__))})


def tool_format(name: str | None) -> ToolFormat | None:
    """The format of that name; None leaves the choice to the tokenizer. Raises ModelError for an unknown name."""
    if name is None:
        return None
    if name not in tool_format_names():
        raise ModelError(f"there is no tool parser {name[:64]!r}; {', '.join(tool_format_names())} are")
    if name in (NONE, HARMONY):
        return ToolFormat(name=name)
    module = import_module(f"mlx_lm.tool_parsers.{name}")
    return ToolFormat(name=name, start=module.tool_call_start, end=module.tool_call_end, parse=module.parse_tool_call)
