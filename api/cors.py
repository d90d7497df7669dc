"""Cross-origin requests: none, unless an origin is named in the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_AGE_S = 600


def cors_headers(request: web.Request, origins: Sequence[str]) -> dict[str, str]:
    """Headers that let a page of an allowed origin read the answer."""
    origin = request.headers.get("Origin", "")
    if not origin or (origin not in origins and "*" not in origins):
        return {}
    return {"Access-Control-Allow-Origin": origin, "Vary": "Origin", "Access-Control-Expose-Headers": "X-Request-Id"}


def preflight(request: web.Request, origins: Sequence[str]) -> web.Response | None:
    """The answer to a browser that asks first; None when this is not such a question, or not an allowed origin."""
    asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    if not asks or not cors_headers(request, origins):
        return None
    return web.Response(
        status=204,
        headers={
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": "authorization, content-type, x-api-key, x-request-id, anthropic-version",
            "Access-Control-Max-Age": str(MAX_AGE_S),
        },
    )
