"""The server as a process: start, signals, drain."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from mlx_troupe.api.server import reaches_beyond_this_machine

from .serving import CHAT, HI, Answer

ROOT = Path(__file__).parents[2]


class Process:
    def __init__(self, process: asyncio.subprocess.Process, url: str, session: aiohttp.ClientSession) -> None:
        self.process = process
        self.url = url
        self.session = session

    async def get(self, path: str) -> Answer:
        async with self.session.get(self.url + path) as response:
            return Answer(response.status, response.headers, await response.read())

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def until_not_ready(self, reason: str) -> Answer:
        while (answer := await self.get("/readyz")).json["reason"] != reason:
            pass
        return answer

    async def ended(self) -> tuple[int, str]:
        assert self.process.stderr is not None
        errors = (await self.process.stderr.read()).decode()
        return await self.process.wait(), errors


@asynccontextmanager
async def process(mode: str, *flags: str) -> AsyncIterator[Process]:
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-m", "tests.api.run_fake_server", mode, *flags),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert server.stdout is not None
        line = (await server.stdout.readline()).decode()
        async with aiohttp.ClientSession() as session:
            yield Process(server, line.split()[-1] if line else "", session)
    finally:
        if server.returncode is None:
            server.kill()
            await server.wait()


@asynccontextmanager
async def streaming(server: Process) -> AsyncIterator[aiohttp.StreamReader]:
    """A stream that has had its first word."""
    async with server.session.post(server.url + CHAT, json=HI | {"stream": True}) as response:
        while b"Hel" not in await response.content.readline():
            pass
        yield response.content


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_stop_when_idle(number):
    async with process("ready") as server:
        async with server.session.post(server.url + CHAT, json=HI) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "Hello, wörld!"
        server.signal(number)
        code, errors = await server.ended()
    assert code == 0
    assert "Traceback" not in errors
    assert "POST /v1/chat/completions 200" in errors


async def test_listens_while_loading_and_stops_then():
    async with process("loading") as server:
        assert (await server.get("/livez")).status == 200
        answer = await server.get("/readyz")
        assert answer.status == 503
        assert answer.json["reason"] == "loading"
        assert (await server.get("/v1/models")).error["code"] == "not_ready"
        async with server.session.post(server.url + CHAT, json=HI) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "loading"
        server.signal(signal.SIGTERM)
        code, errors = await server.ended()
    assert code == 0
    assert "Traceback" not in errors


async def test_a_model_that_does_not_load():
    async with process("broken") as server:
        code, errors = await server.ended()
    assert code == 1
    assert "no such model; try demo" in errors
    assert "Traceback" not in errors


async def test_drain_refuses_new_requests_and_ends_old_ones_with_an_error():
    async with process("hang", "--drain-timeout-s", "0.3") as server, streaming(server) as stream:
        server.signal(signal.SIGTERM)
        await server.until_not_ready("draining")
        async with server.session.post(server.url + CHAT, json=HI) as response:
            assert response.status == 503
            assert response.headers["Retry-After"]
            assert response.headers["Connection"] == "close"
        rest = (await stream.read()).decode()
        code, errors = await server.ended()
    assert json.loads(rest.strip().removeprefix("data: "))["error"]["code"] == "not_ready"
    assert code == 0
    assert "Traceback" not in errors


async def test_a_second_signal_forces():
    async with process("stubborn") as server, streaming(server) as stream:
        server.signal(signal.SIGTERM)
        await server.until_not_ready("draining")
        server.signal(signal.SIGTERM)
        with pytest.raises(aiohttp.ClientPayloadError):
            await stream.read()
        code, errors = await server.ended()
    assert code == 130
    assert "Traceback" not in errors


async def test_an_address_in_use():
    async with process("ready") as first, process("ready", "--port", first.url.rpartition(":")[2]) as second:
        code, errors = await second.ended()
        assert code == 1
        assert "cannot listen on 127.0.0.1" in errors
        assert "Traceback" not in errors


async def test_other_machines_need_a_word():
    async with process("ready", "--host", "0.0.0.0") as server:
        code, errors = await server.ended()
    assert code == 2
    assert "--insecure" in errors
    async with process("ready", "--host", "0.0.0.0", "--insecure") as server:
        assert server.url.startswith("http://0.0.0.0:")
        server.signal(signal.SIGTERM)
        assert (await server.ended())[0] == 0


@pytest.mark.parametrize(
    ("host", "far"),
    [
        ("127.0.0.1", False),
        ("127.8.8.8", False),
        ("::1", False),
        ("localhost", False),
        ("0.0.0.0", True),
        ("::", True),
        ("192.168.0.1", True),
        ("my-mac.local", True),
    ],
)
def test_reaches_beyond_this_machine(host, far):
    assert reaches_beyond_this_machine(host) is far
