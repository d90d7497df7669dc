"""What the engine process says to the front process. `number` and `model` are those of `to_engine`."""

from __future__ import annotations

from typing import Literal

import msgspec

from .. import errors
from ..events import Event
from ..generation import ModelInfo
from ..service import Readiness

KINDS: dict[str, type[errors.TroupeError]] = {
    kind.__name__: kind
    for kind in (
        errors.InvalidRequest,
        errors.ContextLengthExceeded,
        errors.RequestTimedOut,
        errors.RequestCancelled,
        errors.EngineFailed,
        errors.ActorDied,
    )
}
LATER_KINDS: dict[str, type[errors.Overloaded]] = {kind.__name__: kind for kind in (errors.Overloaded, errors.NotReady)}


class Failure(msgspec.Struct, frozen=True):
    """An error on its way to another process."""

    kind: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: float = 1.0

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """What is known of an error; one that is not for callers is an internal one."""
        if not isinstance(error, errors.TroupeError):
            return cls("", errors.TroupeError.code, _sendable(f"{type(error).__name__}: {error}"))
        retry_after_s = error.retry_after_s if isinstance(error, errors.Overloaded) else 1.0
        return cls(type(error).__name__, error.code, _sendable(error.message), error.param, retry_after_s)

    def error(self) -> errors.TroupeError:
        """The error again; of a kind that is not known here, a plain TroupeError with the same code."""
        later = LATER_KINDS.get(self.kind)
        if later is not None:
            return later(self.message, retry_after_s=self.retry_after_s, code=self.code)
        return KINDS.get(self.kind, errors.TroupeError)(self.message, param=self.param, code=self.code)


def _sendable(text: str) -> str:
    """Text that quotes half a surrogate pair, without it."""
    return text.encode("utf-8", "replace").decode()


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The version is the same; loading begins."""

    pid: int


class Loading(msgspec.Struct, frozen=True, tag=True):
    """How far a download or a conversion is; see `models.progress.Progress`."""

    stage: str
    done: int
    total: int | None
    unit: Literal["bytes", "tensors"]


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """Nothing is served, and the process ends."""

    failure: Failure


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Requests are served from now on."""


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """The engine process's loop turns. Sent at an interval, and whenever what it says has changed.

    Attributes:
        readiness: of the model.
        info: what is served; None while it is not.
    """

    readiness: Readiness
    info: ModelInfo | None
    model: str = ""


class Words(msgspec.Struct, frozen=True, tag=True):
    """Texts and bytes of token ids that the next events name for the first time."""

    words: list[tuple[int, str, bytes]]
    model: str = ""


class StreamEvents(msgspec.Struct, frozen=True, array_like=True):
    """New events of one stream, and the choices that end with them."""

    number: int
    events: list[Event]
    ended: tuple[int, ...] = ()


class Events(msgspec.Struct, frozen=True, tag=True):
    """A turn's events of all streams."""

    streams: list[StreamEvents]


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """A request is submitted."""

    number: int
    request_id: str
    prompt_tokens: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A call failed; of a stream that was accepted, every choice that has not ended."""

    number: int
    failure: Failure


class Answer(msgspec.Struct, frozen=True, tag=True):
    """A call's result, as msgpack: the caller knows its type."""

    number: int
    value: msgspec.Raw


ToFront = Welcome | Loading | LoadFailed | Loaded | Pulse | Words | Events | Accepted | Refused | Answer
