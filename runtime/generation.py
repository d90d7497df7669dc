"""The public request and its result: what a caller hands to the runtime and gets back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from .events import FinishReason, PositionLogprobs, PromptLogprobs, Usage
from .grammar.spec import Grammar
from .reading import Pooling
from .sampling_params import SamplingParams

MAX_CHOICES = 8
MAX_STOPS = 16


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Exactly one of `messages`, `prompt` and `tokens` is given.

    Attributes:
        messages: chat messages, rendered with the model's own template.
        prompt: raw text, tokenised as it stands.
        tokens: token ids, used as they stand.
        sampling: how tokens are picked.
        max_tokens: most output tokens a choice; None is the rest of the context, 0 computes the prompt alone.
        prompt_logprobs: None, or how many of the likeliest tokens come with each prompt token's log-probability.
        embed: the prompt becomes a vector, pooled in this way, and nothing is generated.
        stop: strings that end the output and are not part of it.
        stop_token_ids: ids that end the output, besides the model's own end tokens.
        ignore_eos: go on past the model's end tokens.
        min_tokens: end tokens and stop ids are suppressed until so many output tokens exist.
        n: choices drawn from one prefill; choice i uses seed + i.
        template_args: extra variables for the chat template.
        tools: tool definitions for the chat template.
        grammar: what the output must match.
        split: "none" leaves the output as text; "whole" takes thoughts and tool calls out of it, a call once it is
            complete; "stream" hands out arguments while they are written. Chats only.
        tool_choice: "required" and "named" force calls by a grammar; `tool_name` is the named one.
        parallel_tool_calls: "required" may give several calls.
        thinking_budget: most tokens of a thought, which is closed then; ignored where the model has none.
        continue_final_message: the last message is the assistant's and is continued rather than answered.
        timeout_s: the whole request, queue included, ends with reason "timeout" after so long.
        priority: lower is served first; equal ones first come, first served.
        cache: False keeps this request out of the prefix cache.
        cache_salt: prefixes are shared only with requests of the same salt.
        request_id: for logs, `cancel` and the API; made up when empty.
    """

    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt: str | None = None
    tokens: tuple[int, ...] | None = None
    sampling: SamplingParams = SamplingParams()
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    embed: Pooling | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    n: int = 1
    template_args: Mapping[str, Any] = {}
    tools: tuple[Mapping[str, Any], ...] | None = None
    grammar: Grammar | None = None
    split: Literal["none", "whole", "stream"] = "none"
    tool_choice: Literal["auto", "required", "named"] = "auto"
    tool_name: str = ""
    parallel_tool_calls: bool = True
    thinking_budget: int | None = None
    continue_final_message: bool = False
    timeout_s: float | None = None
    priority: int = 0
    cache: bool = True
    cache_salt: str = ""
    request_id: str = ""


class ToolCall(msgspec.Struct, frozen=True):
    """One call of a function; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class Choice(msgspec.Struct, frozen=True):
    """One finished choice: its text, ids, log-probabilities (its own and the prompt's, if asked) and why it ended.

    `embedding` is the prompt's vector, if that was asked: native float32, not of unit length.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[PositionLogprobs, ...] | None = None
    stop: str | int | None = None
    usage: Usage = Usage()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    prompt: PromptLogprobs | None = None
    embedding: bytes = b""


class Completion(msgspec.Struct, frozen=True):
    """A whole answer, choices in index order."""

    request_id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text


class EmbeddingQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Texts to turn into vectors.

    Attributes:
        inputs: texts, or token ids used as they stand.
        pooling: None is what the model's folder or the configuration says.
        dimensions: keep the first so many numbers of each vector; None keeps all.
        timeout_s, priority: of the whole query, as of a Generation.
        request_id: `cancel` knows the inputs by this and "-" and their place.
    """

    inputs: tuple[str | tuple[int, ...], ...]
    pooling: Pooling | None = None
    dimensions: int | None = None
    timeout_s: float | None = None
    priority: int = 0
    request_id: str = ""


class Embeddings(msgspec.Struct, frozen=True):
    """Vectors of unit length, little-endian float32, in the order of the inputs; tokens of all inputs together."""

    vectors: tuple[bytes, ...]
    prompt_tokens: int


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the served model is.

    Attributes:
        name: the name clients use.
        context_length: most tokens of prompt and output together.
        vocab_size: number of token ids the model scores; ids lie below it.
        layout: "batched" rows, or "row-by-row" for models whose caches cannot share a batch.
        quantized: the preset or bits in words, None when not.
        weight_bytes: bytes of weights.
        created: Unix seconds when it was loaded.
        has_chat_template: whether `messages` can be answered.
        aliases: other names clients may use: the one the operator gave ("demo", a hub id, a folder).
    """

    name: str
    context_length: int
    vocab_size: int
    layout: str = "batched"
    quantized: str | None = None
    weight_bytes: int = 0
    created: int = 0
    has_chat_template: bool = True
    aliases: tuple[str, ...] = ()
