"""`/openapi.json` and `/docs`: what is served, from the types that decode requests and encode answers."""

from __future__ import annotations

import html
import inspect
import re
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from .page import PATHS as PAGE_PATHS
from .page import content_type
from .version import package_version
from .wire.chat import ChatCompletion, ChatRequest
from .wire.completions import CompletionRequest, TextCompletion
from .wire.embeddings import EmbeddingList, EmbeddingRequest
from .wire.errors import ErrorBody
from .wire.messages import MessageAnswer, MessagesRequest, TokenCount
from .wire.models import ModelCard, ModelList
from .wire.responses import Response, ResponsesRequest
from .wire.text import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

# What a route takes and gives, and whether it can stream; other routes give JSON or text of no fixed shape.
_TYPES: dict[tuple[str, str], tuple[Any, Any, bool]] = {
    ("post", "/v1/chat/completions"): (ChatRequest, ChatCompletion, True),
    ("post", "/v1/completions"): (CompletionRequest, TextCompletion, True),
    ("post", "/v1/embeddings"): (EmbeddingRequest, EmbeddingList, False),
    ("post", "/v1/messages"): (MessagesRequest, MessageAnswer, True),
    ("post", "/v1/messages/count_tokens"): (MessagesRequest, TokenCount, False),
    ("post", "/v1/responses"): (ResponsesRequest, Response, True),
    ("get", "/v1/responses/{id}"): (None, Response, False),
    ("post", "/tokenize"): (TokenizeRequest, TokenizeAnswer, False),
    ("post", "/detokenize"): (DetokenizeRequest, DetokenizeAnswer, False),
    ("get", "/v1/models"): (None, ModelList, False),
    ("get", "/v1/models/{id}"): (None, ModelCard, False),
}
_TEXT_ROUTES = {"/metrics": "text/plain", "/docs": "text/html"} | {
    path: content_type(name) for path, name in PAGE_PATHS.items()
}
_OPEN_ROUTES = {"/livez", *PAGE_PATHS}
_STATUSES = {
    "400": "Refused, the field named",
    "401": "No known key",
    "403": "Not for this name or origin",
    "404": "Not here",
    "408": "The body took too long",
    "413": "Too large",
    "415": "Not JSON",
    "429": "Too much, try later",
    "499": "Cancelled",
    "500": "A fault of the server",
    "503": "Not ready",
    "504": "The request's time is up",
}
DOCUMENT = web.AppKey("openapi", bytes)
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "X-Frame-Options": "DENY"}


def document(app: web.Application, *, with_keys: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document of an application's routes."""
    types = {kind for pair in _TYPES.values() for kind in pair[:2] if kind is not None} | {ErrorBody}
    ordered = sorted(types, key=lambda kind: str(kind.__name__))
    schemas, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    references = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler in _routes(app):
        operation = paths.setdefault(path, {})[method] = _operation(method, path, handler, references)
        if with_keys and path in _OPEN_ROUTES:
            operation["security"] = []
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "mlx-troupe", "version": package_version()},
        "paths": paths,
        "components": {"schemas": components},
    }
    if with_keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


async def show_document(request: web.Request) -> web.Response:
    """This document."""
    return web.Response(body=request.app[DOCUMENT], content_type="application/json")


async def show_docs(request: web.Request) -> web.Response:
    """A page that lists the routes."""
    rows = "".join(
        f"<tr><td>{method.upper()}</td><td><code>{html.escape(path)}</code></td>"
        f"<td>{html.escape(_summary(handler))}</td></tr>"
        for method, path, handler in _routes(request.app)
    )
    style = "body{font:16px system-ui;margin:2rem auto;max-width:60rem}td{padding:.3rem 1rem .3rem 0}"
    body = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>mlx-troupe</title><style>{style}</style>"
        f"<h1>mlx-troupe</h1><p>Fields and answers: <a href=/openapi.json>/openapi.json</a></p>"
        f"<table>{rows}</table></html>"
    )
    return web.Response(text=body, content_type="text/html", headers=_PAGE_HEADERS)


def _routes(app: web.Application) -> Iterator[tuple[str, str, Any]]:
    for route in app.router.routes():
        if route.method != "HEAD" and route.resource is not None:
            yield route.method.lower(), re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.resource.canonical), route.handler


def _summary(handler: object) -> str:
    return (inspect.getdoc(handler) or "").partition("\n")[0]


def _operation(method: str, path: str, handler: object, references: dict[Any, Any]) -> dict[str, Any]:
    takes, gives, streams = _TYPES.get((method, path), (None, None, False))
    kind = _TEXT_ROUTES.get(path, "application/json")
    content: dict[str, Any] = {kind: {"schema": references[gives]} if gives is not None else {}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    errors = {"application/json": {} if path.startswith("/v1/messages") else {"schema": references[ErrorBody]}}
    operation: dict[str, Any] = {
        "summary": _summary(handler),
        "operationId": getattr(handler, "__name__", path),
        "responses": {"200": {"description": "Done", "content": content}}
        | {status: {"description": text, "content": errors} for status, text in _STATUSES.items()},
    }
    if takes is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": references[takes]}},
        }
    names = re.findall(r"\{(\w+)\}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return operation
