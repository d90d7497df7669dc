"""Errors as clients see them: an HTTP status and OpenAI's error body.

The mapping from the runtime's errors is by code, since a Failed event carries no exception. Texts of faults on our side
stay in the log; the client gets the request's id to ask about.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import msgspec

from ..runtime.errors import Overloaded, TroupeError
from .wire.errors import ErrorBody, ErrorDetail

if TYPE_CHECKING:
    from ..runtime.events import Failed

logger = logging.getLogger(__name__)

AUTHENTICATION = "authentication_error"
INVALID = "invalid_request_error"
NOT_FOUND = "not_found_error"
RATE_LIMIT = "rate_limit_error"
SERVER = "server_error"
TIMEOUT = "timeout_error"

CLIENT_CLOSED_REQUEST = 499

# The runtime's code: status and type. Codes absent here are judged by what the error carries.
_KINDS: dict[str, tuple[int, str]] = {
    "invalid_value": (400, INVALID),
    "context_length_exceeded": (400, INVALID),
    "model_not_found": (404, INVALID),
    "overloaded": (429, RATE_LIMIT),
    "not_ready": (503, SERVER),
    "actor_died": (503, SERVER),
    "timeout": (504, TIMEOUT),
    "cancelled": (CLIENT_CLOSED_REQUEST, INVALID),
    "grammar_failed": (400, INVALID),
    "engine_failed": (500, SERVER),
    "internal_error": (500, SERVER),
}

_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

# The runtime's names for what clients send under another name.
_PARAMS = {
    "tokens": "prompt",
    "max_tokens_default": "max_tokens",
    "repetition_window": "repetition_context_size",
    "presence_window": "presence_context_size",
    "frequency_window": "frequency_context_size",
    "template_args": "chat_template_kwargs",
    "timeout_s": "timeout",
}


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status, when no part of the answer has been sent.
        kind: OpenAI's `type`.
        param: field at fault.
        code: short stable name.
        retry_after_s: when to try again, in seconds.
        retry: False tells OpenAI's clients not to repeat the request by themselves.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        kind: str,
        code: str,
        param: str | None = None,
        retry_after_s: float | None = None,
        retry: bool = True,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.retry = retry

    def body(self) -> bytes:
        """OpenAI's error body, in JSON."""
        detail = ErrorDetail(self.message, self.kind, self.param, self.code)
        return msgspec.json.encode(ErrorBody(detail))

    def anthropic_body(self) -> bytes:
        """Anthropic's error body, in JSON."""
        kind = _ANTHROPIC_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": self.message}})

    def headers(self) -> dict[str, str]:
        """Headers that tell a client when to come back, if at all."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if not self.retry:
            headers["X-Should-Retry"] = "false"
        return headers


def invalid(message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 400) -> ApiError:
    """The request is at fault."""
    return ApiError(message, status=status, kind=INVALID, param=param, code=code)


def internal(request_id: str, *, status: int = 500, code: str = "internal_error") -> ApiError:
    """The server is at fault; what happened stands in the log under the id."""
    message = f"The server failed on this request; its log has the reason under {request_id}"
    return ApiError(message, status=status, kind=SERVER, code=code)


def from_troupe(error: TroupeError, request_id: str) -> ApiError:
    """The answer to an error that a call to the runtime raised."""
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
    base = type(error).code  # an error's own code may be finer than its class's
    return _api_error(base, error.code, error.message, error.param, retry_after_s, request_id)


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """The answer to anything that was raised; what nobody expected is logged, and the client told only the id."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TroupeError):
        return from_troupe(error, request_id)
    logger.error("request %s failed", request_id, exc_info=error)
    return internal(request_id)


def from_failed(event: Failed, request_id: str) -> ApiError:
    """The answer to a choice that ended with an error."""
    return _api_error(event.code, event.code, event.message, event.param, event.retry_after_s, request_id)


def ended_early(reason: str) -> ApiError:
    """The answer to a request that ended with reason "cancelled" or "timeout", which no client expects as a
    `finish_reason`."""
    message = "The request's time is up" if reason == "timeout" else "The request was cancelled"
    status, kind = _KINDS[reason]
    return ApiError(message, status=status, kind=kind, code=reason, retry=False)


def _api_error(
    base: str, code: str, message: str, param: str | None, retry_after_s: float | None, request_id: str
) -> ApiError:
    status, kind = _KINDS.get(code) or _KINDS.get(base) or _guessed(param, retry_after_s)
    if status in (500, 503) and retry_after_s is None:
        logger.error("request %s failed (%s): %s", request_id, code, message)
        return internal(request_id, status=status, code=code)
    param = _PARAMS.get(param, param) if param is not None else None
    retry = status not in (CLIENT_CLOSED_REQUEST, 504) or retry_after_s is not None
    return ApiError(message, status=status, kind=kind, code=code, param=param, retry_after_s=retry_after_s, retry=retry)


def _guessed(param: str | None, retry_after_s: float | None) -> tuple[int, str]:
    if retry_after_s is not None:
        return 503, SERVER
    if param is not None:
        return 400, INVALID
    return 500, SERVER
