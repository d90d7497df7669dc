"""`/livez`, `/readyz`, `/metrics` and `/v1/troupe/status`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from ..runtime.errors import NotReady
from .context import CONTEXT, LOADING_RETRY_AFTER_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..runtime.directory import ModelDirectory, ModelEntry


async def live(_: web.Request) -> web.Response:
    """The event loop turns."""
    return web.json_response({"status": "live"})


async def ready(request: web.Request) -> web.Response:
    """Whether new requests are served; 503 and the reason while not."""
    models = request.app[CONTEXT].models
    readiness = models.readiness()
    body: dict[str, Any] = {
        "status": "ready" if readiness.ready else "unready",
        "reason": readiness.reason,
        "detail": readiness.detail,
    }
    if len(entries := _entries(models)) > 1:
        body["models"] = {
            entry.name: {"state": entry.state, "detail": entry.detail, "progress": entry.progress} for entry in entries
        }
    headers = {} if readiness.ready else {"Retry-After": str(int(LOADING_RETRY_AFTER_S))}
    return web.Response(
        body=msgspec.json.encode(body),
        status=200 if readiness.ready else 503,
        content_type="application/json",
        headers=headers,
    )


def _entries(models: ModelDirectory) -> Sequence[ModelEntry]:
    try:
        return models.entries()
    except NotReady:
        return ()


async def status(request: web.Request) -> web.Response:
    """Queues, memory and counters, for an operator."""
    return web.Response(
        body=msgspec.json.encode(await request.app[CONTEXT].models.status()),
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


async def metrics(request: web.Request) -> web.Response:
    """Prometheus exposition text of the runtime's metrics, then those of HTTP."""
    context = request.app[CONTEXT]
    own = await context.models.metrics()
    if own and not own.endswith(b"\n"):
        own += b"\n"
    return web.Response(
        body=own + context.metrics.exposition(),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8", "Cache-Control": "no-store"},
    )
