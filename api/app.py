"""The aiohttp application over a Service."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from ..runtime.directory import directory_of
from .context import CONTEXT, ApiContext
from .http_metrics import HttpMetrics
from .middleware import around, decorate
from .openapi import DOCUMENT, document, show_docs, show_document
from .page import add_page
from .routes_chat import chat_completions
from .routes_completions import completions
from .routes_embeddings import embeddings
from .routes_health import live, metrics, ready, status
from .routes_messages import count_tokens, messages
from .routes_models import cancel_request, list_models, show_model
from .routes_responses import delete_response, responses, show_response
from .routes_text import detokenize, tokenize
from .settings import ServerSettings
from .tracing import NO_TRACING

if TYPE_CHECKING:
    from ..runtime.directory import ModelDirectory
    from ..runtime.service import Service
    from .keys import ApiKeys
    from .tracing import Tracing


def create_app(
    served: Service | ModelDirectory,
    settings: ServerSettings | None = None,
    keys: ApiKeys | None = None,
    tracing: Tracing = NO_TRACING,
) -> web.Application:
    """An application that serves a model or several; run it with `handler_cancellation`, as `server.listening` does."""
    settings = settings or ServerSettings()
    app = web.Application(middlewares=[around], client_max_size=settings.max_body_bytes)
    app[CONTEXT] = ApiContext(directory_of(served), settings, HttpMetrics(), keys, tracing)
    app.on_response_prepare.append(decorate)
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/embeddings", embeddings)
    app.router.add_post("/v1/messages", messages)
    app.router.add_post("/v1/messages/count_tokens", count_tokens)
    app.router.add_post("/v1/responses", responses)
    app.router.add_get("/v1/responses/{id}", show_response)
    app.router.add_delete("/v1/responses/{id}", delete_response)
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/v1/models/{id:.+}", show_model)
    app.router.add_delete("/v1/requests/{id}", cancel_request)
    app.router.add_get("/v1/troupe/status", status)
    app.router.add_get("/livez", live)
    app.router.add_get("/readyz", ready)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/openapi.json", show_document)
    app.router.add_get("/docs", show_docs)
    if settings.page:
        add_page(app)
    app[DOCUMENT] = msgspec.json.encode(document(app, with_keys=bool(keys)))
    return app
