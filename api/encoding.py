"""What `streaming` needs of an encoder, whichever protocol it speaks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..runtime.events import Event
    from .errors import ApiError


class StreamEncoder(Protocol):
    """Events of the runtime into bytes of one event stream.

    Attributes:
        error: set when the stream has ended with an error; its event is the last thing encoded.
        stage: "queued", "prefill" or "decode".
        prompt_tokens: of the request; set before the first event.
    """

    error: ApiError | None
    stage: str
    prompt_tokens: int

    @property
    def finished(self) -> bool:
        """Every choice has ended, or the stream has failed."""
        ...

    @property
    def failed(self) -> bool:
        """The stream has ended with an error."""
        ...

    def encode(self, events: Iterable[Event]) -> bytes:
        """Bytes of a batch of events, the stream's end included when they bring it; b"" if none is visible."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """End the stream: bytes of its error event."""
        ...

    def broken_off(self) -> bytes:
        """End the stream because the runtime has nothing more to say."""
        ...

    def opening(self) -> bytes:
        """What comes before everything else."""
        ...

    def keepalive(self) -> bytes:
        """Something that clients skip."""
        ...
