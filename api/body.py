"""Reads a request's body, within its limits and before any work."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .errors import INVALID, ApiError, invalid

if TYPE_CHECKING:
    from aiohttp import web

    from .settings import ServerSettings


async def read_body(request: web.Request, settings: ServerSettings) -> bytes:
    """The body of a JSON request. Raises ApiError: 413, 415, 408.

    The content type must say JSON: a web page may send anything else to this machine without asking first.
    """
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise invalid("Compressed request bodies are not accepted", code="unsupported_content_encoding", status=415)
    if request.content_type != "application/json" or "Content-Type" not in request.headers:
        raise invalid("Send the header Content-Type: application/json", code="unsupported_content_type", status=415)
    if (request.content_length or 0) > settings.max_body_bytes:
        raise _too_large(settings)
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > settings.max_body_bytes:
                    raise _too_large(settings)
    except TimeoutError:
        raise ApiError("The body did not arrive in time", status=408, kind=INVALID, code="body_timeout") from None
    return bytes(body)


def _too_large(settings: ServerSettings) -> ApiError:
    return invalid(f"The body is larger than {settings.max_body_bytes} bytes", code="body_too_large", status=413)
