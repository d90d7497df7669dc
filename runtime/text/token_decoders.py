"""Tokens to text, one at a time, never half a character.

Characters come out as soon as their last byte is there. U+FFFD stands only for bytes that no continuation can
make valid, and, at the end, for a character that the generation left unfinished. Used on the event loop's
thread.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from .vocabulary import Piece

# A character has at most four bytes; more tokens that still end in U+FFFD are truly invalid.
MAX_HELD_TOKENS = 8


class TokenDecoder(Protocol):
    """The text of one growing sequence of tokens."""

    def add(self, token: int) -> str:
        """Take the next token; return the characters that became whole.

        Raises:
            ValueError: for an id outside the vocabulary.
        """
        ...

    def finish(self) -> str:
        """What was incomplete, with U+FFFD for it."""
        ...


class PieceDecoder:
    """Joins pieces of a Vocabulary: about 0.2 us a token."""

    __slots__ = ("_pending", "_pieces", "_strip_space")

    def __init__(self, pieces: list[Piece], *, strip_space: bool) -> None:
        """Start a text.

        Args:
            pieces: text or bytes of each id.
            strip_space: drop one space at the start of the text.
        """
        self._pieces = pieces
        self._pending = b""
        self._strip_space = strip_space

    def add(self, token: int) -> str:
        """See TokenDecoder."""
        if not 0 <= token < len(self._pieces):
            raise ValueError(f"token id {token} is outside the vocabulary of {len(self._pieces)}")
        piece = self._pieces[token]
        text = piece if isinstance(piece, str) and not self._pending else self._join(piece)
        return self._stripped(text) if self._strip_space else text

    def finish(self) -> str:
        """See TokenDecoder."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text

    def _join(self, piece: Piece) -> str:
        data = self._pending + (piece.encode() if isinstance(piece, str) else piece)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def _stripped(self, text: str) -> str:
        if text:
            self._strip_space = False
        return text.removeprefix(" ")


class WindowDecoder:
    """For tokenizers whose tokens have no text of their own: decodes the last few tokens again.

    The text of a window's first part is cut from the text of the whole window, as TGI and vLLM do.
    """

    __slots__ = ("_decode", "_shown_text", "_shown_tokens", "_window")

    def __init__(self, decode: Callable[[list[int]], str], context: list[int]) -> None:
        """Start a text.

        Args:
            decode: the tokenizer's own, special tokens kept.
            context: tokens that count as said before; empty when the text starts here.
        """
        self._decode = decode
        self._window = list(context)
        self._shown_tokens = len(context)
        self._shown_text = decode(context) if context else ""

    def add(self, token: int) -> str:
        """See TokenDecoder; an id outside the vocabulary fails as the tokenizer's decode does."""
        if token < 0:
            raise ValueError(f"token id {token} is outside the vocabulary")
        self._window.append(token)
        text = self._decode(self._window)
        held_tokens = len(self._window) - self._shown_tokens
        if held_tokens < MAX_HELD_TOKENS and (text.endswith("\ufffd") or len(text) <= len(self._shown_text)):
            return ""
        return self._show(text)

    def finish(self) -> str:
        """See TokenDecoder."""
        return self._show(self._decode(self._window))

    def _show(self, text: str) -> str:
        delta = text[len(self._shown_text) :]
        if not delta:  # tokens without text; the window's start must keep some
            del self._window[self._shown_tokens :]
            return ""
        del self._window[: self._shown_tokens]
        self._shown_tokens = len(self._window)
        self._shown_text = self._decode(self._window)
        return delta
