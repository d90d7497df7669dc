"""A Hugging Face hub of one repository on localhost: listing, resolving and downloading, nothing else."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """What the server serves and what it was asked for."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.status = 200
        """Answer to every request about the repository."""
        self.error_code = ""
        """`X-Error-Code` of a refusal: "GatedRepo", "RepoNotFound"."""
        self.downloads: list[str] = []
        self.authorization: set[str] = set()
        self.url = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a GET of `path`."""
        if self.status != 200:
            return self.status, {"X-Error-Code": self.error_code}, b"{}"
        if path.startswith(f"/api/models/{self.name}/revision/"):
            return self._revision(path.rpartition("/")[2])
        if path.startswith(f"/api/models/{self.name}/tree/"):
            return 200, {}, json.dumps([self._entry(file) for file in self._files()]).encode()
        if path.startswith(f"/{self.name}/resolve/"):
            return self._content(path.split("/", 5)[5])
        if path == "/":
            return 200, {}, b""
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"

    def _revision(self, revision: str) -> tuple[int, dict[str, str], bytes]:
        if revision not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        content: dict[str, Any] = {"id": self.name, "sha": COMMIT, "siblings": [], "tags": []}
        return 200, {}, json.dumps(content).encode()

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def _entry(self, path: Path) -> dict[str, Any]:
        name = path.relative_to(self.folder).as_posix()
        return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _etag(path)}

    def _content(self, name: str) -> tuple[int, dict[str, str], bytes]:
        path = self.folder / name
        if not path.is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": COMMIT}, path.read_bytes()


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()


@contextlib.contextmanager
def running_hub(name: str, folder: Path) -> Iterator[FakeHub]:
    """Serve `folder` as the repository `name` while the context is open."""
    hub = FakeHub(name, folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._send(body=False)

        def do_GET(self) -> None:
            self._send(body=True)

        def _send(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.authorization.add(self.headers.get("Authorization", ""))
            status, headers, content = hub.answer(path)
            if body and "/resolve/" in path:
                hub.downloads.append(path.split("/", 5)[5])
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
