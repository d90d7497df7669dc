"""One end of the socket: messages in frames of a length and that many bytes of msgpack.

What is said in one turn of the event loop leaves in one write. A peer that breaks the rules (a frame too large, bytes
that are no message) is cut off.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

Heard = TypeVar("Heard")

HEADER_BYTES = 4
MAX_FRAME_BYTES = 256 << 20
"""More than any message: the largest is a long prompt's log-probabilities."""
WRITE_BUFFER_BYTES = 1 << 20
"""Unsent bytes at which the peer counts as slow."""


class FrameTooLarge(ValueError):
    """A message is larger than MAX_FRAME_BYTES."""


def encode_hook(value: object) -> object:
    """Mappings that are no dict, as a Generation may hold."""
    if hasattr(value, "keys") and hasattr(value, "__getitem__"):
        return dict(cast("Any", value))
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_hook)


def frame_of(message: object, limit_bytes: int = MAX_FRAME_BYTES) -> bytearray:
    """A message as its frame.

    Raises:
        FrameTooLarge: it is larger than `limit_bytes`.
        TypeError, OverflowError, RecursionError, UnicodeEncodeError: it holds what msgpack cannot say.
    """
    frame = bytearray(HEADER_BYTES)
    _encoder.encode_into(message, frame, HEADER_BYTES)
    size = len(frame) - HEADER_BYTES
    if size > limit_bytes:
        raise FrameTooLarge(f"a message of {size} bytes; the limit is {limit_bytes}")
    frame[:HEADER_BYTES] = size.to_bytes(HEADER_BYTES, "big")
    return frame


def encoded(value: object) -> msgspec.Raw:
    """A value inside a message. Raises what `frame_of` raises, but FrameTooLarge."""
    return msgspec.Raw(_encoder.encode(value))


class Link(asyncio.Protocol, Generic[Heard]):
    """Owned by the event loop's thread.

    Args:
        decoder: of the peer's messages.
        hear: called with each message.
        lost: called once, with the reason, when the connection is gone.
        gather: called before each write, unless the peer is slow; gives more frames.
        limit_bytes: of a frame.
    """

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[Heard],
        hear: Callable[[Heard], None],
        lost: Callable[[str], None],
        gather: Callable[[], list[bytearray]] | None = None,
        limit_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._decoder = decoder
        self._hear = hear
        self._on_lost = lost
        self._gather = gather
        self._limit_bytes = limit_bytes
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._unsent: list[bytearray] = []
        self._scheduled = False
        self._paused = False
        self._reason = ""
        self.closed = asyncio.Event()

    @property
    def paused(self) -> bool:
        """The peer reads more slowly than it is written to."""
        return self._paused

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait for the peer."""
        queued = sum(map(len, self._unsent))
        return queued + (0 if self._transport is None else self._transport.get_write_buffer_size())

    def send(self, message: object) -> None:
        """Say something at the end of this turn; nothing when the connection is gone. Raises what `frame_of` raises."""
        frame = frame_of(message, self._limit_bytes)
        if not self.closed.is_set():
            self._unsent.append(frame)
            self.schedule()

    def schedule(self) -> None:
        """Write at the end of this turn."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        transport = self._transport
        if transport is None or transport.is_closing():
            self._unsent.clear()
            return
        try:
            gathered = self._gather() if self._gather is not None and not self._paused else []
        except Exception:
            logger.exception("what waits cannot be gathered; the connection is given up")
            self.abort("what waits could not be gathered")
            return
        frames, self._unsent = self._unsent + gathered, []
        if frames:
            transport.write(frames[0] if len(frames) == 1 else b"".join(frames))

    def abort(self, reason: str) -> None:
        """Cut the connection off."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    async def close(self, timeout_s: float) -> None:
        """Send what waits, and close; a peer that does not take it is cut off after `timeout_s`."""
        self._flush()
        if self._transport is not None:
            self._transport.close()
        try:
            async with asyncio.timeout(timeout_s):
                await self.closed.wait()
        except TimeoutError:
            self.abort("the peer does not read")

    # --- called by the loop ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        self._received.clear()
        self._on_lost(self._reason or (str(exc) if exc else "the connection was closed"))

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self.schedule()

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            while (frame := self._next_frame()) is not None:
                self._hear(self._decoder.decode(frame))
        except (FrameTooLarge, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            logger.error("the peer broke the rules and is cut off: %s", error)
            self.abort(str(error))
        except Exception:
            logger.exception("a message could not be handled; the connection is given up")
            self.abort("a message could not be handled")

    def _next_frame(self) -> bytes | None:
        """The next whole frame's bytes. Raises FrameTooLarge."""
        received = self._received
        if len(received) < HEADER_BYTES:
            return None
        size = int.from_bytes(received[:HEADER_BYTES], "big")
        if size > self._limit_bytes:
            raise FrameTooLarge(f"a frame of {size} bytes; the limit is {self._limit_bytes}")
        end = HEADER_BYTES + size
        if len(received) < end:
            return None
        frame = bytes(received[HEADER_BYTES:end])
        del received[:end]
        return frame
