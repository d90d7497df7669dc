"""What encoders of named events (Anthropic's, and of OpenAI's responses) share. See `encoding.StreamEncoder`."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from .errors import internal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..runtime.events import Event
    from .errors import ApiError

logger = logging.getLogger(__name__)


class EventEncoder(ABC):
    """Encodes one stream; nothing follows an error.

    Args:
        request_id: named in the error of an answer that broke off.
    """

    def __init__(self, request_id: str) -> None:
        self.error: ApiError | None = None
        self.stage = "queued"
        self.prompt_tokens = 0
        self._request_id = request_id
        self._done = False

    @property
    def finished(self) -> bool:
        """See StreamEncoder."""
        return self._done or self.error is not None

    @property
    def failed(self) -> bool:
        """See StreamEncoder."""
        return self.error is not None

    def encode(self, events: Iterable[Event]) -> bytes:
        """See StreamEncoder."""
        pieces: list[bytes] = []
        for event in events:
            self._one(event, pieces)
            if self.error is not None:
                break
        return b"".join(pieces)

    def fail(self, error: ApiError) -> bytes:
        """See StreamEncoder."""
        self.error = error
        return self._error_event(error)

    def broken_off(self) -> bytes:
        """See StreamEncoder."""
        logger.error("request %s: events ended before the answer did", self._request_id)
        return self.fail(internal(self._request_id))

    @abstractmethod
    def _one(self, event: Event, pieces: list[bytes]) -> None:
        """Append what one event becomes."""

    @abstractmethod
    def _error_event(self, error: ApiError) -> bytes:
        """The event that tells of an error."""
