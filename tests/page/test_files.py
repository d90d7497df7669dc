"""The page's files as HTTP serves them; no browser needed."""

import asyncio
import re
from importlib.resources import files

import pytest

from mlx_troupe.api.keys import ApiKeys
from mlx_troupe.api.page import PATHS, content_type
from tests.api.serving import serving

FOLDER = files("mlx_troupe.api.page")
KEYS = ApiKeys([("alice", "a-secret-key-of-alice")])
ELSEWHERE = [
    "/page/../app.py",
    "/page/%2e%2e/app.py",
    "/page/..%2fapp.py",
    "/page/..\\app.py",
    "/page//etc/passwd",
    "//etc/passwd",
    "/page/page.js%00",
    "/page/page.js/",
    "/page/index.html",
    "/page/__init__.py",
    "/page/",
    "/page",
    "/page/page%2Ejs/../__init__.py",
    "/page/./__init__.py",
]


async def raw_get(port, target):
    """Status line, headers and body of a target that no client would send as it is."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer.decode(errors="replace")


@pytest.mark.parametrize("target", ELSEWHERE)
async def test_no_path_leads_anywhere_else(target):
    async with serving() as client:
        assert (await raw_get(client.port, target)).startswith(("HTTP/1.1 404", "HTTP/1.1 400"))
    async with serving(keys=KEYS) as client:
        assert (await raw_get(client.port, target)).startswith(("HTTP/1.1 401", "HTTP/1.1 400"))


@pytest.mark.parametrize("path", PATHS)
async def test_every_file_comes_whole_and_guarded(path):
    async with serving(keys=KEYS) as client:
        answer = await client.get(path)
        assert answer.status == 200
        assert answer.body == (FOLDER / PATHS[path]).read_bytes()
        assert answer.headers["Content-Type"] == f"{content_type(PATHS[path])}; charset=utf-8"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert not re.search(r"https?:|\*", policy)
        assert "Set-Cookie" not in answer.headers
        head = await client.request("HEAD", path)
        assert (head.status, head.body) == (200, b"")
        assert (await client.request("POST", path)).status == 401
        assert (await client.get(path, headers={"Host": "evil.example"})).status == 403


async def test_it_can_be_turned_off():
    async with serving(page=False) as client:
        for path in PATHS:
            assert (await client.get(path)).status == 404
    async with serving(page=False, keys=KEYS) as client:
        for path in PATHS:
            assert (await client.get(path)).status == 401


def test_every_file_is_served_and_names_no_other_host():
    there = {entry.name for entry in FOLDER.iterdir() if not entry.name.startswith("__")}
    assert there == set(PATHS.values())
    for name in there:
        text = (FOLDER / name).read_text(encoding="utf-8")
        assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text), (
            name
        )
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"\son\w+=|style=|<script(?![^>]*\ssrc=)|<style", page)


def test_what_it_loads_is_what_there_is():
    named = re.findall(r'(?:src|href)="(/page/[^"]+)"', (FOLDER / "index.html").read_text(encoding="utf-8"))
    for name in PATHS.values():
        if name.endswith(".js"):
            named += [f"/page/{found}" for found in re.findall(r'from "\./([\w.]+)"', (FOLDER / name).read_text())]
    assert set(named) == set(PATHS) - {"/"}
