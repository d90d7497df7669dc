"""Helpers: a server over a fake service on a real socket, and clients for it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
from openai import AsyncOpenAI

from mlx_troupe.api.keys import ApiKeys
from mlx_troupe.api.server import listening
from mlx_troupe.api.settings import ServerSettings
from mlx_troupe.api.tracing import NO_TRACING, Tracing

from .fake_service import FakeService

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


class Answer:
    """A whole HTTP answer."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}
        assert isinstance(found["code"], str)
        return found

    @property
    def chunks(self) -> list[Any]:
        """Data of all events but the end mark."""
        return [json.loads(data) for data in self.events if data != "[DONE]"]

    @property
    def events(self) -> list[str]:
        blocks = self.body.decode().split("\n\n")
        assert blocks[-1] == "", "the last event is not complete"
        return [block.removeprefix("data: ") for block in blocks[:-1] if not block.startswith(":")]

    @property
    def comments(self) -> list[str]:
        return [block for block in self.body.decode().split("\n\n") if block.startswith(":")]


class Client:
    """A client of one server."""

    def __init__(self, url: str, session: aiohttp.ClientSession, service: FakeService) -> None:
        self.url = url
        self.port = int(url.rpartition(":")[2])
        self.session = session
        self.service = service

    async def request(self, method: str, path: str, **arguments: Any) -> Answer:
        async with self.session.request(method, self.url + path, **arguments) as response:
            return Answer(response.status, response.headers, await response.read())

    async def get(self, path: str, **arguments: Any) -> Answer:
        return await self.request("GET", path, **arguments)

    async def post(self, path: str, body: Any, **arguments: Any) -> Answer:
        return await self.request("POST", path, json=body, **arguments)

    async def chat(self, **fields: Any) -> Answer:
        return await self.post(CHAT, HI | fields)

    async def complete(self, **fields: Any) -> Answer:
        return await self.post(COMPLETIONS, {"prompt": "hi"} | fields)

    async def metric(self, line_start: str) -> float:
        for line in (await self.get("/metrics")).body.decode().splitlines():
            if line.startswith(line_start + " "):
                return float(line.rpartition(" ")[2])
        return 0.0

    def openai(self, **arguments: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.url + "/v1", api_key="unused", **({"max_retries": 0} | arguments))

    @asynccontextmanager
    async def raw(self, path: str, body: Any) -> AsyncIterator["RawRequest"]:
        """A request on a bare socket, which the test reads and cuts as it likes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        request = RawRequest(reader, writer)
        try:
            yield request
        finally:
            await request.close()


class RawRequest:
    """A socket with a request on its way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def until(self, text: bytes) -> bytes:
        return await self.reader.readuntil(text)

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()

    def abort(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def serving(
    service: FakeService | None = None,
    *,
    keys: ApiKeys | None = None,
    tracing: Tracing = NO_TRACING,
    **settings: Any,
) -> AsyncIterator[Client]:
    """A server and a client for it. Nothing may be left running afterwards."""
    service = service or FakeService()
    before = asyncio.all_tasks()
    async with (
        listening(service, ServerSettings(**({"port": 0, "access_log": False} | settings)), keys, tracing) as url,
        aiohttp.ClientSession() as session,
    ):
        yield Client(url, session, service)
        await session.close()
    assert not service.active
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:  # connections that clients closed just now
        _, left = await asyncio.wait(left, timeout=5)
    assert not left
