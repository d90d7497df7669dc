"""Chat messages from the wire to what templates take. Pure; raises ApiError naming the field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import invalid
from .wire.decode import unsupported

if TYPE_CHECKING:
    from .wire.chat import Message, MessageToolCall

MAX_ID_CHARACTERS = 256
MAX_MESSAGE_CALLS = 128
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_LATER_FIELDS = ("audio", "function_call")


def chat_messages(messages: list[Message] | None, most: int, *, continued: bool) -> tuple[dict[str, Any], ...]:
    """Messages as templates take them."""
    if not messages:
        raise invalid("messages is required and must not be empty", param="messages", code="missing_parameter")
    if len(messages) > most:
        raise invalid(f"messages holds more than {most} messages", param="messages", code="too_many_messages")
    found = tuple(_message(message, f"messages[{place}]") for place, message in enumerate(messages))
    if continued and found[-1]["role"] != "assistant":
        raise invalid(
            "continue_final_message needs the last message to be the assistant's", param="continue_final_message"
        )
    return found


def _message(message: Message, param: str) -> dict[str, Any]:
    if message.role == "function":
        raise unsupported(f"{param}.role", "send tool messages")
    role = _ROLES.get(message.role or "")
    if role is None:
        raise invalid(f"{param}.role must be one of {', '.join(_ROLES)}", param=f"{param}.role")
    for name in _LATER_FIELDS:
        if getattr(message, name) not in (None, []):
            raise unsupported(f"{param}.{name}")
    found: dict[str, Any] = {"role": role, "content": _content(message, role, param)}
    if message.name is not None:
        found["name"] = message.name
    thought = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if thought is not None:
        found["reasoning_content"] = thought
    if message.tool_calls:
        found["tool_calls"] = _calls(message.tool_calls, role, f"{param}.tool_calls")
    if role == "tool":
        found["tool_call_id"] = _call_id(message, param)
    elif message.tool_call_id is not None:
        raise invalid(f"{param}.tool_call_id belongs to tool messages", param=f"{param}.tool_call_id")
    return found


def _call_id(message: Message, param: str) -> str:
    name = f"{param}.tool_call_id"
    if not message.tool_call_id:
        raise invalid(f"{name} is required", param=name, code="missing_parameter")
    if len(message.tool_call_id) > MAX_ID_CHARACTERS:
        raise invalid(f"{name} is too long", param=name)
    return message.tool_call_id


def _calls(calls: list[MessageToolCall], role: str, param: str) -> list[dict[str, Any]]:
    if role != "assistant":
        raise invalid(f"{param} belongs to assistant messages", param=param)
    if len(calls) > MAX_MESSAGE_CALLS:
        raise invalid(f"{param} holds more than {MAX_MESSAGE_CALLS} calls", param=param)
    found = []
    for place, call in enumerate(calls):
        name = f"{param}[{place}]"
        if call.type not in (None, "function"):
            raise unsupported(f"{name}.type", "only function calls are")
        if call.function is None or not call.function.name:
            raise invalid(f"{name}.function.name is required", param=f"{name}.function.name", code="missing_parameter")
        function = {"name": call.function.name, "arguments": call.function.arguments or "{}"}
        found.append({"id": call.id or "", "type": "function", "function": function})
    return found


def _content(message: Message, role: str, param: str) -> str:
    content = message.content
    if content is None:
        if role == "assistant":
            return ""
        raise invalid(f"{param}.content is required", param=f"{param}.content", code="missing_parameter")
    if isinstance(content, str):
        return content
    for place, part in enumerate(content):
        if part.type not in ("text", None):
            raise unsupported(
                f"{param}.content[{place}].type", f"{part.type[:40]!r} parts are not, only text parts are"
            )
        if part.text is None:
            name = f"{param}.content[{place}].text"
            raise invalid(f"{name} is required", param=name, code="missing_parameter")
    return "".join(part.text or "" for part in content)
