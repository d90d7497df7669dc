"""OpenAI's responses: requests to Generations, answers to response objects. Pure; raises ApiError naming the field."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..runtime.generation import Generation
from ..runtime.grammar.spec import Grammar
from ..runtime.sampling_params import SamplingParams
from .checks import real, whole
from .errors import invalid
from .tools import ToolUse, tool_use
from .translate import MAX_TEMPLATE_TEXT_CHARACTERS, MAX_TOKENS
from .turns import alternating
from .wire.decode import unsupported
from .wire.responses import InputDetails, OutputDetails, Response, ResponseUsage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..runtime.events import Usage
    from .settings import ServerSettings
    from .wire.responses import InputItem, InputPart, ResponsesRequest

_HARMLESS = {
    "background": (False,),
    "max_tool_calls": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "conversation": (),
    "prompt": (),
    "moderation": (),
}
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def responses_generation(
    request: ResponsesRequest, settings: ServerSettings, request_id: str, earlier: Sequence[Mapping[str, Any]]
) -> Generation:
    """The one Generation of a request; `earlier` is the conversation that it goes on from."""
    for name, harmless in _HARMLESS.items():
        value = getattr(request, name)
        if value is not None and value not in harmless:
            raise unsupported(name)
    use = _tools(request)
    top_p = real(request.top_p, "top_p", 0, 1)
    temperature = real(request.temperature, "temperature", 0, 2)
    share = settings.default_top_p if top_p is None else top_p
    heat = settings.default_temperature if temperature is None else temperature
    instructions = [{"role": "system", "content": request.instructions}] if request.instructions else []
    new = input_messages(request.input)
    if len(earlier) + len(new) > settings.max_messages:
        raise invalid(f"the conversation holds more than {settings.max_messages} messages", param="input")
    return Generation(
        request_id=request_id,
        messages=alternating((*instructions, *earlier, *new)),
        sampling=SamplingParams(
            temperature=heat if share > 0 else 0.0,
            top_p=share if share > 0 else 1.0,
            top_k=settings.default_top_k,
            min_p=settings.default_min_p,
            repetition_penalty=settings.default_repetition_penalty,
        ),
        max_tokens=whole(request.max_output_tokens, "max_output_tokens", 1, MAX_TOKENS),
        tools=use.tools or None,
        tool_choice=use.choice,
        tool_name=use.name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        template_args=_template_args(request, settings),
        thinking_budget=_budget(request),
        grammar=_grammar(request),
        split="stream" if request.stream else "whole",
        timeout_s=settings.request_timeout_s,
    )


def served_tools(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The function tools. Others run at OpenAI (web search) or are Codex's own kinds (`namespace`): beside function
    tools among which the model may choose, it goes without them, and the response's `tools` say so; else they are
    refused."""
    tools = request.tools or []
    served = [tool for tool in tools if tool.get("type") == "function"]
    if len(served) < len(tools) and (not served or request.tool_choice not in (None, "auto", "none")):
        place = next(place for place, tool in enumerate(tools) if tool.get("type") != "function")
        raise unsupported(f"tools[{place}].type", "only function tools are")
    return served


def input_messages(given: str | list[InputItem] | None) -> list[dict[str, Any]]:
    """Messages of the input; calls and thoughts join the assistant's message they belong to."""
    if given is None or given == []:
        raise invalid("input is required and must not be empty", param="input", code="missing_parameter")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[dict[str, Any]] = []
    for place, item in enumerate(given):
        _add(item, f"input[{place}]", found)
    return found


def empty_response(request: ResponsesRequest, generation: Generation, name: str, model: str, created: int) -> Response:
    """The response object before there is any output."""
    effort = request.reasoning.effort if request.reasoning is not None else None
    output_format = request.text.format if request.text is not None else None
    kind = output_format.type if output_format is not None and output_format.type else "text"
    schema = {} if output_format is None or output_format.schema is None else {"schema": output_format.schema}
    return Response(
        id=name,
        created_at=created,
        status="in_progress",
        instructions=request.instructions,
        max_output_tokens=generation.max_tokens,
        metadata=request.metadata or {},
        model=model,
        output=[],
        parallel_tool_calls=generation.parallel_tool_calls,
        previous_response_id=request.previous_response_id,
        reasoning={"effort": effort, "summary": None},
        store=request.store is not False,
        temperature=generation.sampling.temperature,
        text={"format": {"type": kind, **schema}},
        tool_choice=request.tool_choice or "auto",
        tools=served_tools(request),
        top_p=generation.sampling.top_p,
    )


def close_response(response: Response, reason: str, usage: Usage) -> None:
    """Fill in how it ended and what it took."""
    response.status = "incomplete" if reason == "length" else "completed"
    if reason == "length":
        response.incomplete_details = {"reason": "max_output_tokens"}
    response.usage = ResponseUsage(
        usage.prompt_tokens,
        InputDetails(usage.cached_tokens),
        usage.completion_tokens,
        OutputDetails(usage.reasoning_tokens),
        usage.prompt_tokens + usage.completion_tokens,
    )


def assistant_message(output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An answer as a later template takes it."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls = []
    for item in output:
        match item["type"]:
            case "message":
                message["content"] += "".join(part["text"] for part in item["content"])
            case "function_call":
                calls.append(_call(item["call_id"], item["name"], item["arguments"]))
            case _:
                message["reasoning_content"] = "".join(part["text"] for part in item["content"])
    if calls:
        message["tool_calls"] = calls
    return message


def _add(item: InputItem, param: str, found: list[dict[str, Any]]) -> None:
    match item.type:
        case "message" | None:
            role = _ROLES.get(item.role or "")
            if role is None:
                raise invalid(f"{param}.role must be one of {', '.join(_ROLES)}", param=f"{param}.role")
            if role == "assistant":
                last = _assistant(found)
                last["content"] += _text(item.content, f"{param}.content")
            else:
                found.append({"role": role, "content": _text(item.content, f"{param}.content")})
        case "function_call":
            if not item.name or not item.call_id:
                raise invalid(f"{param} needs name and call_id", param=param, code="missing_parameter")
            _assistant(found).setdefault("tool_calls", []).append(
                _call(item.call_id, item.name, item.arguments or "{}")
            )
        case "function_call_output":
            if not item.call_id:
                raise invalid(f"{param}.call_id is required", param=f"{param}.call_id", code="missing_parameter")
            text = _text(item.output, f"{param}.output")
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
        case "reasoning":
            if item.content:
                _assistant(found)["reasoning_content"] = _text(item.content, f"{param}.content")
        case _:
            raise unsupported(f"{param}.type", "messages, function calls, their outputs and reasoning are")


def _assistant(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The open message of the assistant: a turn's thought, text and calls are items of their own here."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _text(content: str | list[InputPart] | None, param: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise invalid(f"{param} is required", param=param, code="missing_parameter")
    for place, part in enumerate(content):
        if part.type not in _TEXT_PARTS:
            raise unsupported(f"{param}[{place}].type", f"{(part.type or 'untyped')[:40]!r} parts are not, text is")
        if part.text is None:
            raise invalid(
                f"{param}[{place}].text is required", param=f"{param}[{place}].text", code="missing_parameter"
            )
    return "".join(part.text or "" for part in content)


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tools(request: ResponsesRequest) -> ToolUse:
    """The flat tools of this API as the nested ones of chats."""
    nested = []
    for tool in served_tools(request):
        function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
        nested.append({"type": "function", "function": function})
    return tool_use(nested, request.tool_choice)


def _template_args(request: ResponsesRequest, settings: ServerSettings) -> dict[str, Any]:
    effort = request.reasoning.effort if request.reasoning is not None else None
    if effort is None:
        return {}
    if "reasoning_effort" not in settings.template_args:
        raise unsupported("reasoning.effort")
    if len(effort) > MAX_TEMPLATE_TEXT_CHARACTERS:
        raise invalid("reasoning.effort is too long", param="reasoning.effort")
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def _budget(request: ResponsesRequest) -> int | None:
    given = request.reasoning.max_tokens if request.reasoning is not None else None
    return whole(given, "reasoning.max_tokens", 0, MAX_TOKENS)


def _grammar(request: ResponsesRequest) -> Grammar | None:
    given = request.text.format if request.text is not None else None
    match given.type if given is not None else None:
        case None | "text":
            return None
        case "json_object":
            return Grammar("json_object", "", "text.format")
        case "json_schema" if given is not None and given.schema is not None:
            return Grammar("json_schema", json.dumps(given.schema), "text.format.schema")
        case _:
            raise unsupported("text.format", "text, json_object, and json_schema with a schema are")
