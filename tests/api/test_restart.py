"""SIGTERM under load over real sockets: everybody is served or told, and the next process finds the prefixes warm."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

from tests.models.tiny import build_tiny

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).parents[2]
STREAMS = 16
PROMPTS = [[20 + index, *range(30, 190)] for index in range(STREAMS)]


@asynccontextmanager
async def server(
    model: Path, prefixes: Path, api_process: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The real command, ready, with a disk tier that is written when RAM gets full and at the end only."""
    settings = {
        "port": "0",
        "page-tokens": "16",
        "cache-dir": str(prefixes),
        "cache-disk-bytes": "67108864",
        "cache-spill": "write-back",
        "drain-timeout-s": "1",
        "api-process": api_process,
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mlx_troupe.api.cli", "serve", str(model), *flags),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().split()[-1]
        async with aiohttp.ClientSession() as session, asyncio.timeout(120):
            while True:
                async with session.get(f"{url}/readyz") as answer:
                    if answer.status == 200:
                        break
                await asyncio.sleep(0.05)
        yield process, url
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def stream(session: aiohttp.ClientSession, url: str, index: int, begun: asyncio.Semaphore) -> str:
    """How a stream ended: "stop", "length" or an error's code. Some are short, some would go on for ever."""
    body = {
        "prompt": PROMPTS[index],
        "max_tokens": 40 if index % 4 == 0 else None,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    }
    end = ""
    async with session.post(f"{url}/v1/completions", json={k: v for k, v in body.items() if v is not None}) as answer:
        assert answer.status == 200
        heard = 0
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return event["error"]["code"]
            heard += 1
            if heard == 2:
                begun.release()
            end = event["choices"][0]["finish_reason"] or end if event["choices"] else end
    return end


@pytest.mark.parametrize("api_process", ["off", "on"])
async def test_sigterm_with_sixteen_streams_and_a_warm_restart(api_process, tmp_path) -> None:
    model = build_tiny("llama", tmp_path / "model")
    prefixes = tmp_path / "prefixes"
    async with server(model, prefixes, api_process) as (process, url), aiohttp.ClientSession() as session:
        begun = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(stream(session, url, index, begun)) for index in range(STREAMS)]
        for _ in range(STREAMS):
            await asyncio.wait_for(begun.acquire(), 60)
        process.send_signal(signal.SIGTERM)
        ends = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert set(ends) <= {"length", "shutting_down"}, ends
        assert ends.count("shutting_down") >= STREAMS // 2
        assert await asyncio.wait_for(process.wait(), 60) == 0
    async with server(model, prefixes, api_process) as (process, url), aiohttp.ClientSession() as session:
        for prompt in PROMPTS:
            body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                usage = (await answer.json())["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= 144, usage
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
