"""`GET /v1/models`, `GET /v1/models/{id}` and `DELETE /v1/requests/{id}`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from .context import CONTEXT
from .errors import NOT_FOUND, ApiError
from .wire.models import ModelCard, ModelList

if TYPE_CHECKING:
    from ..runtime.directory import ModelEntry


async def list_models(request: web.Request) -> web.Response:
    """All served models."""
    return _json(ModelList(data=[_card(entry) for entry in request.app[CONTEXT].models.entries()]))


async def show_model(request: web.Request) -> web.Response:
    """One served model; ids may hold slashes."""
    return _json(_card(request.app[CONTEXT].models.entry(request.match_info["id"])))


async def cancel_request(request: web.Request) -> web.Response:
    """End the request of that answer id or X-Request-Id; its own answer becomes an error."""
    name = request.match_info["id"]
    if not request.app[CONTEXT].cancel(name):
        raise ApiError(f"No request {name[:200]!r} is at work", status=404, kind=NOT_FOUND, code="request_not_found")
    return _json({"id": name, "object": "request", "cancelled": True})


def _card(entry: ModelEntry) -> ModelCard:
    info = entry.info
    return ModelCard(
        id=entry.name,
        created=0 if info is None else info.created,
        context_length=msgspec.UNSET if info is None else info.context_length,
        state=entry.state,
        detail=entry.detail or msgspec.UNSET,
        progress=msgspec.UNSET if entry.progress is None else entry.progress,
        aliases=entry.aliases,
    )


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
