"""What happens around every route: request ids, the Host check, errors in OpenAI's shape, counting and logging."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import time
import uuid
from typing import TYPE_CHECKING

from aiohttp import web

from .context import CONTEXT
from .cors import cors_headers, preflight
from .errors import AUTHENTICATION, CLIENT_CLOSED_REQUEST, INVALID, NOT_FOUND, SERVER, ApiError, as_api_error, invalid
from .keys import presented_key
from .logs import current_request
from .page import PATHS as PAGE_PATHS
from .tracing import NO_TRACING, RequestSpan

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .context import ApiContext
    from .settings import ServerSettings

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

access_logger = logging.getLogger("mlx_troupe.access")

REQUEST_ID = web.RequestKey("request_id", str)
STAGE = web.RequestKey("stage", str)
STATUS = web.RequestKey("status", int)
ERROR_CODE = web.RequestKey("error_code", str)
SPAN = web.RequestKey("span", RequestSpan)
KEY_NAME = web.RequestKey("key_name", str)

_REQUEST_ID_FORM = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
ANONYMOUS = "anonymous"
_PROBES = ("/livez", "/readyz", "/metrics", "/v1/troupe/status")  # asked every few seconds, and logged at debug level
_KINDS = {404: NOT_FOUND, 405: INVALID, 413: INVALID}
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


@web.middleware
async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer with the route's response, or with its error; nothing but a cancellation passes through."""
    context = request.app[CONTEXT]
    given = request.headers.get("X-Request-Id", "")
    request[REQUEST_ID] = given if _REQUEST_ID_FORM.fullmatch(given) else uuid.uuid4().hex
    route = _route(request)
    tracing = NO_TRACING if route in _PROBES else context.tracing
    started = time.monotonic()
    status = CLIENT_CLOSED_REQUEST
    context.metrics.started()
    mark = current_request.set(request[REQUEST_ID])
    with tracing.request(request.method, route, request.headers, request[REQUEST_ID]) as span:
        request[SPAN] = span
        try:
            response = await _answer(request, handler, context)
            status = request.get(STATUS, response.status)
        except asyncio.CancelledError:
            status = request.setdefault(STATUS, CLIENT_CLOSED_REQUEST)
            raise
        finally:
            if request.get(STATUS) == CLIENT_CLOSED_REQUEST:
                context.metrics.disconnected(request.get(STAGE, "body"))
            seconds = time.monotonic() - started
            context.metrics.ended(route, status, seconds)
            tracing.answered(span, status, request.get(ERROR_CODE))
            if context.settings.access_log:
                _log(request, route, status, seconds)
            current_request.reset(mark)
    return response


def _log(request: web.Request, route: str, status: int, seconds: float) -> None:
    name = request.get(KEY_NAME, "-")
    access_logger.log(
        logging.DEBUG if route in _PROBES else logging.INFO,
        "%s %s %d %.3fs %s %s",
        request.method,
        route,
        status,
        seconds,
        request[REQUEST_ID],
        name,
        extra={
            "facts": {"method": request.method, "route": route, "status": status, "seconds": round(seconds, 4)}
            | {"key": name, "error": request.get(ERROR_CODE)}
        },
    )


async def decorate(request: web.Request, response: web.StreamResponse) -> None:
    """Headers of every response, just before they are sent."""
    response.headers["Server"] = "mlx-troupe"
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers.update(cors_headers(request, request.app[CONTEXT].settings.cors_origins))
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
        if _speaks_anthropic(request):
            response.headers["Request-Id"] = request[REQUEST_ID]


def error_response(error: ApiError, *, anthropic: bool = False) -> web.Response:
    """An answer that is an error, in OpenAI's shape or Anthropic's."""
    body = error.anthropic_body() if anthropic else error.body()
    response = web.Response(status=error.status, body=body, content_type="application/json", headers=error.headers())
    if error.status == CLIENT_CLOSED_REQUEST:
        response.set_status(CLIENT_CLOSED_REQUEST, "Client Closed Request")
    return response


async def _answer(request: web.Request, handler: Handler, context: ApiContext) -> web.StreamResponse:
    try:
        _check_host(request, context.settings)
        if (answer := preflight(request, context.settings.cors_origins)) is not None:
            return answer
        _check_key(request, context)
        if request.method != "POST":
            return await handler(request)
        with context.limits.admitted(request[KEY_NAME]):
            return await handler(request)
    except Exception as error:
        found = _api_error(error, request)
    context.metrics.failed(found.code)
    request[ERROR_CODE] = found.code
    response = error_response(found, anthropic=_speaks_anthropic(request))
    if found.status == 503:
        response.force_close()  # the next try may reach another server
    return response


def _api_error(error: Exception, request: web.Request) -> ApiError:
    if not isinstance(error, web.HTTPException):
        return as_api_error(error, request[REQUEST_ID])
    status = error.status
    kind = _KINDS.get(status, INVALID if status < 500 else SERVER)
    message = f"{error.reason}: {request.method} {request.path[:200]}"
    return ApiError(message, status=status, kind=kind, code=_CODES.get(status, "http_error"))


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unmatched"


def _speaks_anthropic(request: web.Request) -> bool:
    return request.path == "/v1/messages" or request.path.startswith("/v1/messages/")


def _check_host(request: web.Request, settings: ServerSettings) -> None:
    """Refuse names that were not made for this server: a web page may point its own name at this machine."""
    host = request.headers.get("Host", "")
    name = _host_name(host)
    if not name or name == "localhost" or name in settings.allowed_hosts or "*" in settings.allowed_hosts:
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        message = f"This server does not answer to {name[:200]!r}; see the setting allowed_hosts"
        raise invalid(message, code="host_not_allowed", status=403) from None


def _check_key(request: web.Request, context: ApiContext) -> None:
    """Deny by default, routes that do not exist included."""
    request[KEY_NAME] = ANONYMOUS
    if not context.keys or _open(request, context.settings):
        return
    presented = presented_key(request.headers)
    name = context.keys.name_of(presented) if presented is not None else None
    if name is None:
        what = "This API key is not known" if presented is not None else "Send an API key: Authorization: Bearer ..."
        raise ApiError(what, status=401, kind=AUTHENTICATION, code="invalid_api_key", retry=False)
    request[KEY_NAME] = name


def _open(request: web.Request, settings: ServerSettings) -> bool:
    """What asks for no key: whether the server lives, and the page's own files, which know nothing of it."""
    reads = request.method in ("GET", "HEAD")
    return reads and (request.path == "/livez" or (settings.page and request.path in PAGE_PATHS))


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
