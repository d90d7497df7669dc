"""Two real processes behind one command: each may be killed at any time, and nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import psutil
import pytest

from tests.models.tiny import build_tiny

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

ROOT = Path(__file__).parents[2]
PATIENCE_S = 250.0
"""A process may be stopped meanwhile, on a machine that is shared."""
pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="reads /proc")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build_tiny("llama", tmp_path_factory.mktemp("llama"))


class Server:
    """`mlx-troupe serve --api-process on`."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url
        # A stream that failed closes its connection: each request has one of its own.
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))

    async def engine(self) -> psutil.Process:
        async with asyncio.timeout(PATIENCE_S):
            while not (found := psutil.Process(self.process.pid).children()):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
        (engine,) = found
        return engine

    async def ready(self) -> tuple[bool, str]:
        async with self.session.get(f"{self.url}/readyz") as answer:
            return answer.status == 200, (await answer.json())["reason"]

    async def until_ready(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not (await self.ready())[0]:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)

    async def stream(self, begun: asyncio.Semaphore | None = None, **fields: object) -> str:
        """How a stream ended: its finish reason, or its error's code."""
        body = {"prompt": [20, 30], "stream": True, "ignore_eos": True, "temperature": 0} | fields
        end = ""
        async with self.session.post(f"{self.url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                return (await answer.json())["error"]["code"]
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return event["error"]["code"]
                if begun is not None:
                    begun.release()
                    begun = None
                end = event["choices"][0]["finish_reason"] or end
        return end

    async def streams(self, count: int) -> list[asyncio.Task[str]]:
        """So many endless ones, which have all begun."""
        begun = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(self.stream(begun)) for _ in range(count)]
        for _ in range(count):
            await asyncio.wait_for(begun.acquire(), PATIENCE_S)
        return tasks

    async def running(self) -> int:
        async with self.session.get(f"{self.url}/v1/troupe/status") as answer:
            statistics = (await answer.json())["statistics"]
            return statistics["running"] + statistics["prefilling"] + statistics["waiting"]

    async def storm(self, clients: int) -> None:
        """So many streams, all of which are left, some before their first byte."""
        tasks = [asyncio.create_task(self.stream()) for _ in range(clients)]
        for number, task in enumerate(tasks):
            await asyncio.sleep(0.002 * (number % 7))
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), PATIENCE_S)


@asynccontextmanager
async def started(model: Path, *flags: str, cwd: Path = ROOT) -> AsyncIterator[Server]:
    """Listens, and perhaps loads still. Neither process and no socket may be left."""
    before = sockets()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "mlx_troupe.api.cli", "serve", str(model), "--port", "0", "--api-process", "on"),
        *flags,
        cwd=cwd,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    url = (await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)).decode().split()[-1]
    server = Server(process, url)
    children = psutil.Process(process.pid).children()
    try:
        yield server
        children += psutil.Process(process.pid).children() if psutil.pid_exists(process.pid) else []
    finally:
        await server.session.close()
        if process.returncode is None:
            process.kill()
            await process.wait()
        await gone(*children)
        process._transport.close()  # its pipes: nobody reads them to their end
        assert sockets() <= before


def sockets() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("mlx-troupe-*/engine"))


def has_mlx(pid: int) -> bool:
    return "libmlx" in Path(f"/proc/{pid}/maps").read_text()


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


async def gone(*processes: psutil.Process) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while any(map(alive, processes)):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)


@asynccontextmanager
async def serving(model: Path, *flags: str) -> AsyncIterator[Server]:
    """Ready to answer."""
    async with started(model, *flags) as server:
        await server.until_ready()
        yield server


async def test_kills_of_the_engine_are_survived_and_those_of_the_front_leave_no_orphan(model) -> None:
    async with serving(model) as server:
        first = await server.engine()
        assert has_mlx(first.pid)
        assert not has_mlx(server.process.pid)
        tasks = await server.streams(4)
        first.kill()
        assert await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S) == ["actor_died"] * 4
        assert await server.ready() == (False, "restarting")
        assert await server.stream() in ("restarting", "not_ready")
        await server.until_ready()
        second = await server.engine()
        assert second.pid != first.pid
        await server.storm(80)
        async with asyncio.timeout(PATIENCE_S):
            while await server.running():  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
        assert await server.stream(max_tokens=5) == "length"
        tasks = await server.streams(2)
        server.process.kill()
        await gone(second)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, aiohttp.ClientError) for result in results)


async def test_a_front_killed_while_the_engine_loads_leaves_no_orphan(model) -> None:
    async with started(model) as server:
        engine = await server.engine()
        server.process.kill()
        await gone(engine)


async def test_sigterm_while_loading_ends_both(model) -> None:
    async with started(model) as server:
        engine = await server.engine()
        server.process.terminate()
        assert await server.exit_code() == 0
        assert not psutil.pid_exists(engine.pid)


async def test_an_engine_killed_while_it_loads_is_a_failure_of_the_command(model) -> None:
    async with started(model) as server:
        (await server.engine()).kill()
        assert await server.exit_code() == 1
        assert server.process.stderr is not None
        assert b"the engine process ended while it loaded" in await server.process.stderr.read()


async def test_what_cannot_be_loaded_says_so_as_in_one_process(tmp_path) -> None:
    (tmp_path / "asyncio.py").write_text("raise SystemError('a module of the working folder was run')")
    async with started(tmp_path / "none", cwd=tmp_path) as server:
        assert await server.exit_code() == 1
        assert server.process.stderr is not None
        said = await server.process.stderr.read()
        assert b"mlx-troupe: " in said
        assert b"none" in said
        assert b"Traceback" not in said


async def test_sigterm_drains_and_the_engine_leaves_signals_to_the_front(model) -> None:
    """A service manager or a terminal sends them to both."""
    async with serving(model, "--drain-timeout-s", "0.5") as server:
        engine = await server.engine()
        tasks = await server.streams(3)
        engine.terminate()
        engine.send_signal(signal.SIGINT)
        server.process.terminate()
        ends = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
        assert set(ends) == {"shutting_down"}
        assert await server.exit_code() == 0
        assert not psutil.pid_exists(engine.pid)


async def test_a_second_sigterm_forces_the_end(model) -> None:
    async with serving(model, "--drain-timeout-s", "600") as server:
        engine = await server.engine()
        tasks = await server.streams(2)
        server.process.terminate()
        await refused(server.ready)
        server.process.terminate()
        assert await server.exit_code() == 130
        assert not psutil.pid_exists(engine.pid)
        await asyncio.gather(*tasks, return_exceptions=True)


async def refused(ready: Callable) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await ready())[0]:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
