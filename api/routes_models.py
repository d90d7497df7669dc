"""`GET /v1/models`, `GET /v1/models/{id}` and `DELETE /v1/requests/{id}`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from .context import CONTEXT
from .errors import NOT_FOUND, ApiError
from .middleware import REQUEST_ID
from .wire.models import ModelCard, ModelList

if TYPE_CHECKING:
    from ..runtime.generation import ModelInfo


async def list_models(request: web.Request) -> web.Response:
    """All served models."""
    model = request.app[CONTEXT].model(None, request[REQUEST_ID])
    return _json(ModelList(data=[_card(model)]))


async def show_model(request: web.Request) -> web.Response:
    """One served model; ids may hold slashes."""
    model = request.app[CONTEXT].model(request.match_info["id"], request[REQUEST_ID])
    return _json(_card(model))


async def cancel_request(request: web.Request) -> web.Response:
    """End the request of that answer id or X-Request-Id; its own answer becomes an error."""
    name = request.match_info["id"]
    if not request.app[CONTEXT].cancel(name):
        raise ApiError(f"No request {name[:200]!r} is at work", status=404, kind=NOT_FOUND, code="request_not_found")
    return _json({"id": name, "object": "request", "cancelled": True})


def _card(model: ModelInfo) -> ModelCard:
    return ModelCard(id=model.name, created=model.created, context_length=model.context_length)


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
