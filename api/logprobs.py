"""Log-probabilities in OpenAI's two shapes, from token ids and numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .wire.chat import ChatLogprobs, TokenAlternative, TokenEntry
from .wire.completions import LegacyLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..runtime.events import PositionLogprobs, TokenLogprob

    TokenText = Callable[[int], tuple[str, bytes]]

LOWEST_LOGPROB = -9999.0  # JSON has no -inf; OpenAI's own stand-in


def chat_logprobs(positions: Iterable[PositionLogprobs], token_text: TokenText) -> ChatLogprobs:
    """The chat shape: every token with its text and exact bytes."""
    return ChatLogprobs([_entry(position, token_text) for position in positions])


def legacy_logprobs(positions: Iterable[PositionLogprobs], token_text: TokenText, offset: int = 0) -> LegacyLogprobs:
    """The completions shape: parallel lists; `offset` is the first token's place in the text, in characters."""
    found = LegacyLogprobs([], [], [], [])
    for position in positions:
        text = token_text(position.chosen.token)[0]
        found.tokens.append(text)
        found.token_logprobs.append(_finite(position.chosen.logprob))
        # Two tokens may share a text; the likelier one comes first and stays.
        top: dict[str, float] = {}
        for candidate in position.top:
            top.setdefault(token_text(candidate.token)[0], _finite(candidate.logprob))
        found.top_logprobs.append(top)
        found.text_offset.append(offset)
        offset += len(text)
    return found


def _entry(position: PositionLogprobs, token_text: TokenText) -> TokenEntry:
    text, logprob, raw = _described(position.chosen, token_text)
    top = [TokenAlternative(*_described(candidate, token_text)) for candidate in position.top]
    return TokenEntry(text, logprob, raw, top)


def _described(token: TokenLogprob, token_text: TokenText) -> tuple[str, float, list[int]]:
    text, raw = token_text(token.token)
    return text, _finite(token.logprob), list(raw)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB) if logprob == logprob else LOWEST_LOGPROB
