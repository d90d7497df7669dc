"""Every error that leaves the runtime, each with a code that stays the same and a text that says what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class TroupeError(Exception):
    """Base of all errors raised to callers of the runtime.

    Attributes:
        code: short machine-readable name, stable across versions.
        param: the request parameter at fault, when there is one.
    """

    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(TroupeError):
    """The request can never succeed as it stands."""

    code = "invalid_value"


class UnknownModel(InvalidRequest):
    """No model of that name is served."""

    code = "model_not_found"

    def __init__(self, name: str, served: Sequence[str]) -> None:
        are = f"{served[0]!r} is" if len(served) == 1 else f"{', '.join(map(repr, served))} are"
        super().__init__(f"The model {name[:200]!r} is not served here; {are}", param="model")


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output together do not fit the model's context."""

    code = "context_length_exceeded"


class Overloaded(TroupeError):
    """The queue is full or the runtime is draining; the same request may succeed later.

    Attributes:
        retry_after_s: when to try again, in seconds.
    """

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class NotReady(Overloaded):
    """The model is loading, draining or its executor is gone."""

    code = "not_ready"


class RequestTimedOut(TroupeError):
    """The request's deadline passed before it finished."""

    code = "timeout"


class RequestCancelled(TroupeError):
    """The caller cancelled the request."""

    code = "cancelled"


class EngineFailed(TroupeError):
    """The forward pass of this request raised."""

    code = "engine_failed"


class ActorDied(TroupeError):
    """An actor ended while this call waited for its answer."""

    code = "actor_died"
