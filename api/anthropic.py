"""Anthropic's messages to Generations, and Completions to its answers. Pure; raises ApiError naming the field."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ..runtime.generation import Generation
from ..runtime.grammar.spec import Grammar
from ..runtime.sampling_params import SamplingParams
from .checks import real, stops, whole
from .errors import ended_early, invalid
from .sse import EARLY_ENDS
from .tools import MAX_TOOLS, CallMode, ToolUse, function_tool
from .translate import MAX_TOKENS
from .turns import alternating
from .wire.decode import unsupported
from .wire.messages import MessageAnswer, MessageUsage, TextBlock, ThinkingBlock, ToolUseBlock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..runtime.events import Usage
    from ..runtime.generation import Choice, Completion
    from .logprobs import TokenText
    from .settings import ServerSettings
    from .sse import StreamHead
    from .wire.messages import Block, InputMessage, InputTool, MessagesRequest, ToolChoice

_CHOICES: dict[str, CallMode | Literal["none"]] = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


def messages_generation(
    request: MessagesRequest, settings: ServerSettings, request_id: str, *, counting: bool = False
) -> Generation:
    """The one Generation of a request; `counting` only needs its prompt."""
    for name in ("container", "mcp_servers"):
        if getattr(request, name) not in (None, []):
            raise unsupported(name)
    if request.max_tokens is None and not counting:
        raise invalid("max_tokens is required", param="max_tokens", code="missing_parameter")
    use = _tool_use(request.tools, request.tool_choice)
    thinks, budget = _thinking(request)
    choice = request.tool_choice
    return Generation(
        request_id=request_id,
        messages=alternating((*_system(request.system), *_turns(request.messages, settings.max_messages))),
        sampling=_sampling(request, settings),
        max_tokens=whole(request.max_tokens, "max_tokens", 1, MAX_TOKENS),
        stop=stops(request.stop_sequences),
        tools=use.tools or None,
        tool_choice=use.choice,
        tool_name=use.name,
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        template_args={"enable_thinking": thinks},
        thinking_budget=budget,
        grammar=_grammar(request),
        split="stream" if request.stream else "whole",
        timeout_s=settings.request_timeout_s,
    )


def message_answer(head: StreamHead, completions: Sequence[Completion], _: TokenText) -> MessageAnswer:
    """The body of an answer. Raises ApiError if it was cancelled or timed out."""
    choice = completions[0].choices[0]
    if choice.finish_reason in EARLY_ENDS:
        raise ended_early(choice.finish_reason)
    reason, sequence = stop_of(choice.finish_reason, choice.stop)
    return MessageAnswer(
        id=head.id,
        model=head.model,
        content=_blocks(choice, thoughts=bool(head.reasoning_fields)),
        stop_reason=reason,
        stop_sequence=sequence,
        usage=usage_of(choice.usage),
    )


def stop_of(reason: str, stop: str | int | None) -> tuple[str, str | None]:
    """Anthropic's `stop_reason` and `stop_sequence`."""
    if reason == "stop" and isinstance(stop, str):
        return "stop_sequence", stop
    return {"length": "max_tokens", "tool_calls": "tool_use"}.get(reason, "end_turn"), None


def usage_of(usage: Usage) -> MessageUsage:
    """Anthropic's counts."""
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )


def wants_thoughts(request: MessagesRequest) -> bool:
    """Whether the answer may hold thinking blocks."""
    return _thinking(request)[0]


def _blocks(choice: Choice, *, thoughts: bool) -> list[TextBlock | ThinkingBlock | ToolUseBlock]:
    blocks: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
    if choice.reasoning and thoughts:
        blocks.append(ThinkingBlock(thinking=choice.reasoning))
    if choice.text:
        blocks.append(TextBlock(text=choice.text))
    blocks += (
        ToolUseBlock(id=call.id, name=call.name, input=msgspec.Raw(call.arguments.encode()))
        for call in choice.tool_calls
    )
    return blocks


def _sampling(request: MessagesRequest, settings: ServerSettings) -> SamplingParams:
    temperature = real(request.temperature, "temperature", 0, 2)
    top_p = real(request.top_p, "top_p", 0, 1)
    top_k = whole(request.top_k, "top_k", 0, 2**31 - 1)
    share = settings.default_top_p if top_p is None else top_p
    heat = settings.default_temperature if temperature is None else temperature
    return SamplingParams(
        temperature=heat if share > 0 else 0.0,
        top_p=share if share > 0 else 1.0,
        top_k=settings.default_top_k if top_k is None else top_k,
        min_p=settings.default_min_p,
        repetition_penalty=settings.default_repetition_penalty,
    )


def _thinking(request: MessagesRequest) -> tuple[bool, int | None]:
    thinking = request.thinking
    if thinking is None or thinking.type == "disabled":
        return False, None
    if thinking.type not in ("enabled", "adaptive"):
        raise invalid("thinking.type must be enabled, disabled or adaptive", param="thinking.type")
    return True, whole(thinking.budget_tokens, "thinking.budget_tokens", 1, MAX_TOKENS)


def _grammar(request: MessagesRequest) -> Grammar | None:
    config = request.output_config
    output = config.format if config is not None and config.format is not None else request.output_format
    if output is None:
        return None
    if output.type != "json_schema" or output.schema is None:
        raise unsupported("output_config.format", "json_schema with a schema is")
    return Grammar("json_schema", json.dumps(output.schema), "output_config.format.schema")


def _tool_use(tools: list[InputTool] | None, choice: ToolChoice | None) -> ToolUse:
    found = _tools(tools or [])
    mode = _CHOICES.get(choice.type or "") if choice is not None else "auto"
    if mode is None:
        raise invalid("tool_choice.type must be auto, any, tool or none", param="tool_choice.type")
    name = (choice.name or "") if choice is not None and mode == "named" else ""
    if mode == "none":
        return ToolUse()
    if mode != "auto" and not found:
        raise invalid("tool_choice needs tools", param="tool_choice")
    if mode == "named" and name not in {tool["function"]["name"] for tool in found}:
        raise invalid(f"tool_choice names {name[:64]!r}, which is not among the tools", param="tool_choice.name")
    return ToolUse(found, mode, name)


def _tools(tools: list[InputTool]) -> tuple[dict[str, Any], ...]:
    if len(tools) > MAX_TOOLS:
        raise invalid(f"tools holds more than {MAX_TOOLS} tools", param="tools")
    found = []
    for place, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            raise unsupported(f"tools[{place}].type", "only the client's own tools are")
        found.append(function_tool(tool.name, tool.description, tool.input_schema, f"tools[{place}]"))
    if len({tool["function"]["name"] for tool in found}) < len(found):
        raise invalid("tools names one tool twice", param="tools")
    return tuple(found)


def _system(system: str | list[Block] | None) -> tuple[dict[str, Any], ...]:
    if not system:
        return ()
    text = system if isinstance(system, str) else _texts(system, "system", joint="\n\n")
    return ({"role": "system", "content": text},)


def _turns(messages: list[InputMessage] | None, most: int) -> list[dict[str, Any]]:
    if not messages:
        raise invalid("messages is required and must not be empty", param="messages", code="missing_parameter")
    if len(messages) > most:
        raise invalid(f"messages holds more than {most} messages", param="messages", code="too_many_messages")
    found: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        param = f"messages[{place}]"
        if message.role == "assistant":
            found.append(_assistant(message, param))
        elif message.role == "user":
            found += _user(message, param)
        elif message.role == "system":
            found += _system(message.content)
        else:
            raise invalid(f"{param}.role must be user or assistant", param=f"{param}.role")
    return found


def _user(message: InputMessage, param: str) -> list[dict[str, Any]]:
    """Tool results become messages of their own, before the text that came with them."""
    content = message.content
    if content is None:
        raise invalid(f"{param}.content is required", param=f"{param}.content", code="missing_parameter")
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results = []
    rest = []
    for place, block in enumerate(content):
        name = f"{param}.content[{place}]"
        if block.type == "tool_result":
            results.append(_result(block, name))
        else:
            rest.append(_text(block, name))
    text = "\n\n".join(rest)
    return [*results, *([{"role": "user", "content": text}] if rest or not results else [])]


def _result(block: Block, param: str) -> dict[str, Any]:
    if not block.tool_use_id:
        raise invalid(f"{param}.tool_use_id is required", param=f"{param}.tool_use_id", code="missing_parameter")
    content = block.content
    text = content if isinstance(content, str) else _texts(content or [], f"{param}.content")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": f"Error: {text}" if block.is_error else text}


def _assistant(message: InputMessage, param: str) -> dict[str, Any]:
    content = message.content
    if content is None or isinstance(content, str):
        return {"role": "assistant", "content": content or ""}
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(content):
        name = f"{param}.content[{place}]"
        match block.type:
            case "tool_use":
                calls.append(_call(block, name))
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case _:
                texts.append(_text(block, name))
    found: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if calls:
        found["tool_calls"] = calls
    if thoughts:
        found["reasoning_content"] = "".join(thoughts)
    return found


def _call(block: Block, param: str) -> dict[str, Any]:
    if not block.name:
        raise invalid(f"{param}.name is required", param=f"{param}.name", code="missing_parameter")
    function = {"name": block.name, "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
    return {"id": block.id or "", "type": "function", "function": function}


def _texts(blocks: list[Block], param: str, joint: str = "") -> str:
    return joint.join(_text(block, f"{param}[{place}]") for place, block in enumerate(blocks))


def _text(block: Block, param: str) -> str:
    if block.type != "text":
        raise unsupported(f"{param}.type", f"{(block.type or 'untyped')[:40]!r} blocks are not, text is")
    if block.text is None:
        raise invalid(f"{param}.text is required", param=f"{param}.text", code="missing_parameter")
    return block.text
