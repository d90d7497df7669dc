"""Text in and out: tokenising and templates off the event loop, streaming text and stop strings on it."""

from .service import TextService
from .stop_strings import MAX_STOP_CHARS, MAX_STOPS
from .stream import TextStream

__all__ = ["MAX_STOPS", "MAX_STOP_CHARS", "TextService", "TextStream"]
