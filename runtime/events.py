"""What a request's owner hears while it runs: plain data, in order, ending with exactly one Finished or Failed.

Arrays, not maps, where they are encoded (`remote`): a token's event has no room for field names.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "timeout"]


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probability of one token.

    Attributes:
        token: id in the model's vocabulary.
        logprob: natural logarithm of its probability before temperature and filters.
    """

    token: int
    logprob: float


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one output position: the chosen token and the best ones, most likely first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class PrefillProgress(msgspec.Struct, frozen=True, tag="prefill", array_like=True):
    """The prompt is `done` of `total` tokens into the KV cache."""

    done_tokens: int
    total_tokens: int


class TextDelta(msgspec.Struct, frozen=True, tag="text", array_like=True):
    """New output.

    Attributes:
        text: never half a character; may be empty while text is held back.
        tokens: ids sampled since the last delta; the text of the last ones may still be held back.
        logprobs: one entry a token, when the request asked.
        index: which of the request's `n` choices.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None = None
    index: int = 0


class ReasoningDelta(msgspec.Struct, frozen=True, tag="reasoning", array_like=True):
    """New text of the thought before the answer; only of requests that are split. Its tokens come in a TextDelta."""

    text: str
    index: int = 0


class ToolCallDelta(msgspec.Struct, frozen=True, tag="tool_call", array_like=True):
    """A tool call, or more of its arguments; only of requests that are split.

    Attributes:
        call: which of the choice's calls.
        id: made up; only in a call's first delta, as is `name`.
        name: of the function.
        arguments: JSON text, whole or the next piece of it.
        index: which choice.
    """

    call: int
    id: str
    name: str
    arguments: str
    index: int = 0


class PromptLogprobs(msgspec.Struct, frozen=True, tag="prompt_logprobs", array_like=True):
    """The prompt's own log-probabilities, before any output; only of requests that asked.

    Attributes:
        tokens: all ids of the prompt.
        logprobs: one entry a token, from the second on: nothing foretells the first.
        index: which choice.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    index: int = 0


class Embedded(msgspec.Struct, frozen=True, tag="embedded", array_like=True):
    """The prompt as one vector, native float32, not yet of unit length; only of requests that asked."""

    vector: bytes
    index: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Token counts and times of one choice, in tokens and seconds; `reasoning_tokens` are among the completion's."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    reasoning_tokens: int = 0


class Finished(msgspec.Struct, frozen=True, tag="finished", array_like=True):
    """A choice ended as it should.

    Attributes:
        reason: why.
        usage: its counts.
        stop: the stop string or the stop token id that matched, when reason is "stop".
        index: which choice.
    """

    reason: FinishReason
    usage: Usage
    stop: str | int | None = None
    index: int = 0


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """A choice ended with an error; `error` is what a waiting call raises.

    Attributes:
        code: the error's stable code, see `errors`.
        message: what happened and what to do.
        param: parameter at fault, if any.
        retry_after_s: set when trying again later may help.
        index: which choice.
    """

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    index: int = 0


ENDS = (Finished, Failed)
"""The last event of a choice is one of these."""

Event = PrefillProgress | PromptLogprobs | Embedded | TextDelta | ReasoningDelta | ToolCallDelta | Finished | Failed
