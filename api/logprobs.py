"""Log-probabilities in OpenAI's two shapes, from token ids and numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .wire.chat import ChatLogprobs, TokenAlternative, TokenEntry
from .wire.completions import LegacyLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..runtime.events import PositionLogprobs, PromptLogprobs, TokenLogprob

    TokenText = Callable[[int], tuple[str, bytes]]

LOWEST_LOGPROB = -9999.0  # JSON has no -inf; OpenAI's own stand-in


def chat_logprobs(positions: Iterable[PositionLogprobs], token_text: TokenText) -> ChatLogprobs:
    """The chat shape: every token with its text and exact bytes."""
    return ChatLogprobs([_entry(position, token_text) for position in positions])


def echoed_logprobs(prompt: PromptLogprobs, text: str, token_text: TokenText) -> LegacyLogprobs:
    """Those of a prompt that stands in the answer as `text`, in the completions shape: its first token has none."""
    first = token_text(prompt.tokens[0])[0]
    found = legacy_logprobs(prompt.logprobs, token_text, after=LegacyLogprobs([first], [None], [None], [0]))
    found.text_offset = token_offsets(text, [token_text(token)[1] for token in prompt.tokens])
    return found


def token_offsets(text: str, tokens: Iterable[bytes]) -> list[int]:
    """Where each token's bytes start in `text`, in characters. Special tokens, which are not in it, take no room."""
    data = text.encode()
    place = characters = 0
    offsets = []
    for token in tokens:
        offsets.append(characters)
        for raw in (token, token[1:] if token[:1] == b" " else token):  # tokenizers put a space in front
            if data.startswith(raw, place):
                characters += sum(byte & 0xC0 != 0x80 for byte in raw)
                place += len(raw)
                break
    return offsets


def legacy_logprobs(
    positions: Iterable[PositionLogprobs],
    token_text: TokenText,
    offset: int = 0,
    *,
    after: LegacyLogprobs | None = None,
) -> LegacyLogprobs:
    """The completions shape: parallel lists, those of `after` first.

    `offset` is the first token's place in the text, in characters.
    """
    found = after or LegacyLogprobs([], [], [], [])
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
