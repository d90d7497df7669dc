"""Texts of tokens in the front process, which has no tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class KnownWords:
    """What the engine process has told so far: the tokens of every event with log-probabilities."""

    def __init__(self) -> None:
        self._by_model: dict[str, dict[int, tuple[str, bytes]]] = {}

    def learn(self, model: str, words: Iterable[tuple[int, str, bytes]]) -> None:
        """Take in new ones."""
        known = self._by_model.setdefault(model, {})
        for token, text, raw in words:
            known[token] = text, raw

    def text(self, token: int, model: str = "") -> tuple[str, bytes]:
        """A token's text and exact bytes. Raises LookupError for one that no event has named."""
        try:
            return self._by_model[model][token]
        except KeyError:
            raise LookupError(f"no event has named token {token}") from None
