"""Token counts as clients read them."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct):
    """Where prompt tokens came from."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """What output tokens were spent on."""

    reasoning_tokens: int = 0


class CompletionUsage(msgspec.Struct):
    """`usage` of an answer; a prompt counts once, however many choices were drawn from it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


def usage_of(
    prompt_tokens: int, cached_tokens: int, completion_tokens: int, reasoning_tokens: int = 0
) -> CompletionUsage:
    """Counts of an answer, in tokens."""
    total = prompt_tokens + completion_tokens
    return CompletionUsage(
        prompt_tokens,
        completion_tokens,
        total,
        PromptTokensDetails(cached_tokens),
        CompletionTokensDetails(reasoning_tokens),
    )
