"""`tools` and `tool_choice` from the wire. Pure; raises ApiError naming the field."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from .errors import invalid
from .wire.decode import unsupported

MAX_TOOLS = 128
MAX_DESCRIPTION_CHARACTERS = 64 << 10
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


CallMode = Literal["auto", "required", "named"]


class ToolUse(msgspec.Struct, frozen=True):
    """What a request may or must call.

    Attributes:
        tools: definitions for the template; () when nothing may be called.
        choice: "auto", "required" or "named".
        name: the named function.
    """

    tools: tuple[dict[str, Any], ...] = ()
    choice: CallMode = "auto"
    name: str = ""


def tool_use(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None) -> ToolUse:
    """Checked tools and choice."""
    found = _tools(tools or [])
    mode, name = _choice(choice)
    if mode == "none":
        return ToolUse()
    if mode != "auto" and not found:
        raise invalid("tool_choice needs tools", param="tool_choice")
    if mode == "named" and name not in {tool["function"]["name"] for tool in found}:
        raise invalid(f"tool_choice names {name[:64]!r}, which is not among the tools", param="tool_choice")
    return ToolUse(found, mode, name)


def function_tool(
    name: object, description: object, parameters: object, param: str, strict: object = None
) -> dict[str, Any]:
    """One checked definition. Templates read the keys in this order."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(f"{param}.name must be 1 to 128 letters, digits and _.:-", param=f"{param}.name")
    function: dict[str, Any] = {"name": name}
    if description is not None:
        if not isinstance(description, str) or len(description) > MAX_DESCRIPTION_CHARACTERS:
            raise invalid(f"{param}.description must be a text that is not too long", param=f"{param}.description")
        function["description"] = description
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{param}.parameters must be an object", param=f"{param}.parameters", code="invalid_type")
    function["parameters"] = parameters if parameters else {"type": "object", "properties": {}}
    if strict is not None:
        function["strict"] = bool(strict)
    return {"type": "function", "function": function}


def _tools(tools: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    if len(tools) > MAX_TOOLS:
        raise invalid(f"tools holds more than {MAX_TOOLS} tools", param="tools")
    found = []
    names: set[str] = set()
    for place, tool in enumerate(tools):
        param = f"tools[{place}]"
        if tool.get("type", "function") != "function":
            raise unsupported(f"{param}.type", "only function tools are")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise invalid(f"{param}.function is required", param=f"{param}.function", code="missing_parameter")
        made = function_tool(
            function.get("name"),
            function.get("description"),
            function.get("parameters"),
            f"{param}.function",
            function.get("strict"),
        )
        name = made["function"]["name"]
        if name in names:
            raise invalid(f"tools names {name!r} twice", param=f"{param}.function.name")
        names.add(name)
        found.append(made)
    return tuple(found)


def _choice(choice: str | dict[str, Any] | None) -> tuple[CallMode | Literal["none"], str]:
    if choice is None:
        return "auto", ""
    if isinstance(choice, str):
        for mode in ("none", "auto", "required"):
            if choice == mode:
                return mode, ""
        raise invalid("tool_choice must be none, auto, required or a function", param="tool_choice")
    if choice.get("type") != "function":
        raise unsupported("tool_choice.type", "only function is")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else choice.get("name")
    if not isinstance(name, str) or not name:
        raise invalid("tool_choice.function.name is required", param="tool_choice.function.name")
    return "named", name
