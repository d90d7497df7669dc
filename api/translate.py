"""From a request on the wire to Generations for the runtime. Pure; raises ApiError naming the field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..runtime.generation import MAX_CHOICES, Generation
from ..runtime.sampling_params import MAX_PENALTY_WINDOW_TOKENS, MAX_TOP_LOGPROBS, SamplingParams
from .checks import logit_bias, prompts, real, stop_token_ids, stops, whole
from .constraints import grammar_of
from .errors import invalid
from .messages import chat_messages
from .tools import tool_use
from .wire.decode import refuse_unsupported, unsupported

if TYPE_CHECKING:
    from .settings import ServerSettings
    from .wire.chat import ChatRequest
    from .wire.completions import CompletionRequest
    from .wire.fields import Number, RequestFields

Value = TypeVar("Value", int, float)

MAX_COMPLETION_LOGPROBS = 5
MAX_TOKENS = 2**31 - 1
MAX_TIMEOUT_S = 7 * 86400.0
MAX_PRIORITY = 1000
MAX_TEMPLATE_TEXT_CHARACTERS = 256
_UNLIMITED = -1  # what clients of llama.cpp and LM Studio send for "no limit" and "any seed"


def chat_generation(request: ChatRequest, settings: ServerSettings, request_id: str) -> Generation:
    """The one Generation of a chat request."""
    refuse_unsupported(request)
    top_logprobs = _chat_top_logprobs(request)
    continued = bool(request.continue_final_message)
    if request.add_generation_prompt is not None and request.add_generation_prompt is continued:
        hint = "it is true, unless continue_final_message is"
        raise unsupported("add_generation_prompt", hint)
    use = tool_use(request.tools, request.tool_choice)
    longest = request.max_completion_tokens
    name = "max_tokens" if longest is None else "max_completion_tokens"
    common = _common(request, settings, top_logprobs, request.max_tokens if longest is None else longest, name)
    return msgspec.structs.replace(
        common,
        request_id=request_id,
        messages=chat_messages(request.messages, settings.max_messages, continued=continued),
        template_args=_template_args(request, settings),
        tools=use.tools or None,
        tool_choice=use.choice,
        tool_name=use.name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        split="stream" if request.stream else "whole",
        thinking_budget=_thinking_budget(request),
        continue_final_message=continued,
    )


def completion_generations(request: CompletionRequest, settings: ServerSettings, request_id: str) -> list[Generation]:
    """One Generation a prompt."""
    refuse_unsupported(request)
    for name in ("tools", "tool_choice"):
        if getattr(request, name) not in (None, [], "none"):
            raise unsupported(name, "chats take tools")
    choices = _choices(request.n)
    if whole(request.best_of, "best_of", 1, 2**31) not in (None, choices):
        raise unsupported("best_of", "it must equal n")
    if request.logprobs is True:
        raise invalid("logprobs must be an integer", param="logprobs", code="invalid_type")
    asked = None if request.logprobs is False else request.logprobs
    top_logprobs = whole(asked, "logprobs", 0, MAX_COMPLETION_LOGPROBS)
    echoed = bool(request.echo)
    common = _common(request, settings, top_logprobs, request.max_tokens, "max_tokens", shortest=0 if echoed else 1)
    given = prompts(request.prompt, settings.max_prompts, "prompt")
    return [
        msgspec.structs.replace(
            common,
            prompt_logprobs=top_logprobs if echoed else None,
            request_id=request_id if len(given) == 1 else f"{request_id}-{place}",
            prompt=prompt if isinstance(prompt, str) else None,
            tokens=None if isinstance(prompt, str) else prompt,
        )
        for place, prompt in enumerate(given)
    ]


def _common(
    request: RequestFields,
    settings: ServerSettings,
    top_logprobs: int | None,
    longest: Number | None,
    longest_name: str,
    shortest: int = 1,
) -> Generation:
    max_tokens = None if longest == _UNLIMITED else whole(longest, longest_name, shortest, MAX_TOKENS)
    min_tokens = whole(request.min_tokens, "min_tokens", 0, MAX_TOKENS) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid(f"min_tokens is more than {longest_name}", param="min_tokens")
    timeout_s = real(request.timeout, "timeout", 0.001, MAX_TIMEOUT_S)
    return Generation(
        sampling=_sampling(request, settings, top_logprobs),
        max_tokens=max_tokens,
        stop=stops(request.stop),
        stop_token_ids=stop_token_ids(request.stop_token_ids),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=min_tokens,
        n=_choices(request.n),
        timeout_s=settings.request_timeout_s if timeout_s is None else timeout_s,
        priority=whole(request.priority, "priority", -MAX_PRIORITY, MAX_PRIORITY) or 0,
        cache=request.cache is not False,
        cache_salt=request.cache_salt or "",
        grammar=grammar_of(request),
    )


def _choices(n: Number | None) -> int:
    return whole(n, "n", 1, MAX_CHOICES) or 1


def _sampling(request: RequestFields, settings: ServerSettings, top_logprobs: int | None) -> SamplingParams:
    top_p = _or(real(request.top_p, "top_p", 0, 1), settings.default_top_p)
    temperature = _or(real(request.temperature, "temperature", 0, 2), settings.default_temperature)
    repetition = real(request.repetition_penalty, "repetition_penalty", 0.01, 100)
    return SamplingParams(
        # A share of 0 keeps the likeliest token alone.
        temperature=temperature if top_p > 0 else 0.0,
        top_p=top_p if top_p > 0 else 1.0,
        top_k=max(0, _or(whole(request.top_k, "top_k", -1, 2**31 - 1), settings.default_top_k)),
        min_p=_or(real(request.min_p, "min_p", 0, 1), settings.default_min_p),
        xtc_probability=_or(real(request.xtc_probability, "xtc_probability", 0, 1), 0.0),
        xtc_threshold=_or(real(request.xtc_threshold, "xtc_threshold", 0, 0.5), SamplingParams().xtc_threshold),
        repetition_penalty=_or(repetition, settings.default_repetition_penalty),
        repetition_window=_window(request.repetition_context_size, "repetition_context_size"),
        presence_penalty=_or(real(request.presence_penalty, "presence_penalty", -2, 2), 0.0),
        presence_window=_window(request.presence_context_size, "presence_context_size"),
        frequency_penalty=_or(real(request.frequency_penalty, "frequency_penalty", -2, 2), 0.0),
        frequency_window=_window(request.frequency_context_size, "frequency_context_size"),
        logit_bias=logit_bias(request.logit_bias),
        seed=_seed(request.seed),
        top_logprobs=top_logprobs,
    )


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def _window(value: Number | None, param: str) -> int:
    return _or(whole(value, param, 1, MAX_PENALTY_WINDOW_TOKENS), SamplingParams().repetition_window)


def _seed(value: Number | None) -> int | None:
    seed = None if value == _UNLIMITED else whole(value, "seed", -(2**63), 2**64 - 1)
    return None if seed is None else seed % 2**63


def _chat_top_logprobs(request: ChatRequest) -> int | None:
    top = whole(request.top_logprobs, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if request.logprobs:
        return top or 0
    if top:
        raise invalid("top_logprobs needs logprobs to be true", param="top_logprobs")
    return None


def _template_args(request: ChatRequest, settings: ServerSettings) -> dict[str, Any]:
    given = dict(request.chat_template_kwargs or {})
    for name, value in given.items():
        param = f"chat_template_kwargs.{name[:64]}"
        if name not in settings.template_args:
            raise unsupported(param, f"requests may set {', '.join(settings.template_args) or 'none'}")
        if not isinstance(value, bool | int | float | str | None):
            raise invalid(f"{param} must be a plain value", param=param, code="invalid_type")
        if isinstance(value, str) and len(value) > MAX_TEMPLATE_TEXT_CHARACTERS:
            raise invalid(f"{param} is too long", param=param)
    _template_arg(given, "reasoning_effort", _effort(request), settings)
    _template_arg(given, "enable_thinking", _enabled(request), settings)
    return given


def _template_arg(given: dict[str, Any], name: str, value: str | bool | None, settings: ServerSettings) -> None:
    """Set what a request's own field says, over `chat_template_kwargs`."""
    if value is None:
        return
    if name not in settings.template_args:
        raise unsupported(name)
    if isinstance(value, str) and len(value) > MAX_TEMPLATE_TEXT_CHARACTERS:
        raise invalid(f"{name} is too long", param=name)
    given[name] = value


def _effort(request: ChatRequest) -> str | None:
    nested = request.reasoning.effort if request.reasoning is not None else None
    return request.reasoning_effort if request.reasoning_effort is not None else nested


def _enabled(request: ChatRequest) -> bool | None:
    nested = request.reasoning.enabled if request.reasoning is not None else None
    if request.enable_thinking is not None:
        return request.enable_thinking
    return False if nested is None and _effort(request) == "none" else nested


def _thinking_budget(request: ChatRequest) -> int | None:
    nested = request.reasoning.max_tokens if request.reasoning is not None else None
    if request.thinking_budget is not None:
        return whole(request.thinking_budget, "thinking_budget", 0, MAX_TOKENS)
    if nested is not None:
        return whole(nested, "reasoning.max_tokens", 0, MAX_TOKENS)
    given = (request.chat_template_kwargs or {}).get("thinking_budget")
    if isinstance(given, bool) or not isinstance(given, int | float):
        return None
    return whole(given, "chat_template_kwargs.thinking_budget", 0, MAX_TOKENS)
