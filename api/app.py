"""The aiohttp application over a Service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from .context import CONTEXT, ApiContext
from .http_metrics import HttpMetrics
from .middleware import around, decorate
from .routes_chat import chat_completions
from .routes_completions import completions
from .routes_health import live, metrics, ready, status
from .routes_models import cancel_request, list_models, show_model
from .settings import ServerSettings

if TYPE_CHECKING:
    from ..runtime.service import Service


def create_app(service: Service, settings: ServerSettings | None = None) -> web.Application:
    """An application that serves `service`; run it with `handler_cancellation`, as `server.listening` does."""
    settings = settings or ServerSettings()
    app = web.Application(middlewares=[around], client_max_size=settings.max_body_bytes)
    app[CONTEXT] = ApiContext(service, settings, HttpMetrics())
    app.on_response_prepare.append(decorate)
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/v1/models/{id:.+}", show_model)
    app.router.add_delete("/v1/requests/{id}", cancel_request)
    app.router.add_get("/v1/troupe/status", status)
    app.router.add_get("/livez", live)
    app.router.add_get("/readyz", ready)
    app.router.add_get("/metrics", metrics)
    return app
