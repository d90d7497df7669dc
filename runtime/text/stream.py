"""One request's text while it is generated: whole characters, without special tokens, up to a stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .stop_strings import StopMatcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .token_decoders import TokenDecoder


class TextStream:
    """Turns one request's tokens into the text that may be sent. Used on the event loop's thread.

    All texts returned, joined, are the text of the tokens (see TextService.open_stream) cut before the first
    stop string. Held back are only an incomplete character and the longest end of the text that begins a stop
    string.

    Attributes:
        stopped: the stop string that matched; the request ends there and no token may follow.
        finished: True once `stopped` is set or `finish` was called.
        emitted_chars: characters returned so far.
    """

    __slots__ = ("_decoder", "_skip", "_stops", "emitted_chars", "finished", "stopped")

    def __init__(self, decoder: TokenDecoder, *, stop: Sequence[str], skip: frozenset[int]) -> None:
        """Start with no text.

        Args:
            decoder: fresh, this stream's own.
            stop: stop strings, none to 16.
            skip: ids that have no text.

        Raises:
            InvalidRequest: too many stop strings, an empty or an overlong one.
        """
        self._decoder = decoder
        self._skip = skip
        self._stops = StopMatcher(stop) if stop else None
        self.stopped: str | None = None
        self.finished = False
        self.emitted_chars = 0

    def add(self, token: int) -> str:
        """Take the next token; return the text that may be sent now, '' while all is held back.

        Raises:
            RuntimeError: the stream has ended.
            ValueError: `token` is outside the vocabulary.
        """
        if self.finished:
            raise RuntimeError("a token came after the end of its text")
        if token in self._skip:
            return ""
        text = self._decoder.add(token)
        if text and self._stops is not None:
            text = self._cut(self._stops, text)
        self.emitted_chars += len(text)
        return text

    def finish(self) -> str:
        """End the text; return what was held back. '' after a stop string or a second time.

        An unfinished character becomes U+FFFD. Should that complete a stop string, `stopped` is set here.
        """
        if self.finished:
            return ""
        text = self._decoder.finish()
        if self._stops is not None:
            text = self._cut(self._stops, text)
            text += self._stops.flush()
        self.finished = True
        self.emitted_chars += len(text)
        return text

    def _cut(self, stops: StopMatcher, text: str) -> str:
        text = stops.feed(text)
        if stops.matched is not None:
            self.stopped = stops.matched
            self.finished = True
        return text
