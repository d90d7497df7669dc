"""SIGTERM while a model loads, at the start and later, to the real command."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

from tests.models.tiny import build_tiny

if TYPE_CHECKING:
    from asyncio.subprocess import Process

ROOT = Path(__file__).parents[2]


async def start(*folders: Path) -> tuple[Process, str]:
    flags = [f"--model={folder}" for folder in folders]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mlx_troupe.api.cli", "serve", "--port=0", "--drain-timeout-s=5", *flags),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    return process, (await process.stdout.readline()).decode().split()[-1]


@pytest.mark.parametrize("when", ["start", "later"])
async def test_a_signal_ends_a_load_and_tells_those_that_wait(tmp_path, when):
    folders = [build_tiny("llama", tmp_path / name) for name in ("one", "two")]
    process, url = await start(*folders)
    try:
        async with asyncio.timeout(90), aiohttp.ClientSession() as session:
            model = "one"
            if when == "later":
                async with session.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1}) as answer:
                    assert answer.status == 200
                model = "two"
            body = {"model": model, "prompt": "x", "max_tokens": 4}
            asked = asyncio.ensure_future(session.post(f"{url}/v1/completions", json=body))
            while True:
                async with session.get(f"{url}/v1/models/{model}") as answer:
                    if (await answer.json())["state"] != "idle":
                        break
                await asyncio.sleep(0.005)
            process.send_signal(signal.SIGTERM)
            async with await asked as answer:
                assert answer.status in (200, 503)
                if answer.status == 503:
                    assert (await answer.json())["error"]["code"] == "shutting_down"
                    assert "Retry-After" in answer.headers
            _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        assert b"Traceback" not in errors, errors.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
