"""OpenAI's error body."""

from __future__ import annotations

import msgspec


class ErrorDetail(msgspec.Struct):
    """What went wrong: `code` is a short stable name, `param` the field at fault."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    """`{"error": ...}`: the body of a failed answer, and the data of a stream's error event."""

    error: ErrorDetail
