"""The page at `/`: a chat and a live view, as static files of this package.

The files are the same in every installation and know nothing of the server, so they need no key: all that the page
shows comes from routes that do, with the key that the person enters. Invariants:
- only names listed here are served, from memory; nothing of a request's path reaches the file system;
- the page runs no script but its own files and asks no host but its own (`Content-Security-Policy`).
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript", "svg": "image/svg+xml"}
_FILES = (
    "index.html",
    "page.css",
    "page.js",
    "chat.js",
    "live.js",
    "markdown.js",
    "server.js",
    "icon.svg",
)
_PREFIX = "/page/"
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}

PATHS = {"/" if name == "index.html" else _PREFIX + name: name for name in _FILES}


def add_page(app: web.Application) -> None:
    """Serve the page and its files."""
    folder = files(__package__)
    for path, name in PATHS.items():
        app.router.add_get(path, _sender((folder / name).read_bytes(), content_type(name), name))


def content_type(name: str) -> str:
    """The media type of one of the page's files, by name or path."""
    return _TYPES[name.rpartition(".")[2]]


def _sender(body: bytes, kind: str, name: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def send(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)

    send.__name__ = f"page_{name.replace('.', '_')}"
    send.__doc__ = (
        "A page to chat with the model and watch the server." if kind == "text/html" else f"The page's {name}."
    )
    return send
