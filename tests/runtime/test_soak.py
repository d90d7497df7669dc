"""Streams over real sockets with random disconnects for minutes: nothing leaks, memory stays flat.

Runs by name: `pytest -m heavy tests/runtime/test_soak.py`; SOAK_SECONDS sets how long (600 by default).
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import random
import sys
import time

import psutil
import pytest

from mlx_troupe.api.server import listening
from mlx_troupe.api.settings import ServerSettings
from mlx_troupe.runtime import Failed, Generation, Runtime, SamplingParams
from mlx_troupe.runtime.messages.cache_store import Reclaim
from mlx_troupe.runtime.messages.executor import SampleMemory

SOAK_SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
STREAMS = 32


async def one_request(port: int, rng: random.Random) -> None:
    """Stream a random request; hang up at a random moment now and then."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    prompt = [rng.randrange(10, 500) for _ in range(rng.choice([1, 5, 40, 200, 700]))]
    mixed = rng.random() < 0.5
    body = {
        "prompt": prompt,
        "max_tokens": rng.choice([1, 8, 40, 120]),
        "stream": True,
        "ignore_eos": True,
        "temperature": 0.8 if mixed else 0,
        "top_p": 0.9,
        "presence_penalty": 0.5 if mixed and rng.random() < 0.3 else 0,
        "logprobs": 2 if rng.random() < 0.2 else None,
        "n": rng.choice([1, 1, 1, 2]),
    }
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}"
    writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n" + data)
    try:
        if rng.random() < 0.3:
            await asyncio.wait_for(reader.read(rng.choice([1, 500, 4000])), rng.choice([0.001, 0.02, 0.2]))
            return
        answer = await reader.read()
        assert b"[DONE]" in answer, answer[-500:]
    except TimeoutError:
        return
    finally:
        writer.close()


async def one_user(port: int, seed: int, until_s: float) -> int:
    rng, count = random.Random(seed), 0
    while time.monotonic() < until_s:
        await one_request(port, rng)
        count += 1
    return count


def memory(runtime: Runtime) -> tuple[int, int, int]:
    """Live MLX bytes, resident bytes of the process, and Python objects."""
    gc.collect()
    return runtime.statistics().memory_active_bytes, psutil.Process().memory_info().rss, len(gc.get_objects())


async def empty_cache(runtime: Runtime) -> None:
    """Let go of all stored pages, and wait until the engine has."""
    parts = runtime._supervisor
    assert parts.troupe is not None
    assert parts.loaded is not None
    parts.troupe.cast.cache_store.ref.tell(Reclaim(1 << 50))
    async with asyncio.timeout(30):
        while parts.loaded.engine.shelf.page_ids:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)


@pytest.mark.heavy
@pytest.mark.parametrize("architecture", ["llama"])
async def test_soak(architecture, folder_of) -> None:
    async with Runtime(model=str(folder_of(architecture)), page_tokens=64, prefix_cache_bytes=8 << 20) as runtime:
        engine, troupe = runtime._supervisor.loaded.engine, runtime._supervisor.troupe
        async with listening(runtime, ServerSettings(port=0)) as url:
            port = int(url.rsplit(":", 1)[1])
            await asyncio.gather(
                *(one_user(port, seed, time.monotonic() + 0.15 * SOAK_SECONDS) for seed in range(STREAMS))
            )
            await idle(runtime)
            before, tasks = memory(runtime), len(asyncio.all_tasks())
            until_s = time.monotonic() + 0.85 * SOAK_SECONDS
            counts = await asyncio.gather(*(one_user(port, 100 + seed, until_s) for seed in range(STREAMS)))
            await idle(runtime)
            after, left = memory(runtime), len(asyncio.all_tasks())
        print(f"{sum(counts)} requests; active/rss/objects before {before} after {after}; {runtime.statistics()}")
        assert left <= tasks + 1
        assert engine._batch.order.count(None) == len(engine._batch.order)
        assert not engine._staged
        assert not engine.shelf.rows_aside
        assert not engine._constraints
        assert not runtime._live
        troupe.cast.cache_store.core.check_integrity(engine.shelf.page_ids)
        assert after[0] <= before[0] * 1.1 + (8 << 20)
        assert after[1] <= before[1] * 1.1 + (32 << 20)
        assert after[2] <= before[2] * 1.1 + 5000


async def idle(runtime: Runtime) -> None:
    for _ in range(1000):
        now = runtime.statistics()
        if now.running == now.prefilling == now.waiting == 0:
            break
        await asyncio.sleep(0.02)
    await asyncio.sleep(1.5)  # a memory sample is taken each second


async def churn(runtime: Runtime, seed: int, until_tokens: int) -> None:
    """One client after the other, greedy and drawn, some of whom leave early."""
    rng = random.Random(seed)
    while runtime.statistics().completion_tokens < until_tokens:
        drawn = rng.random() < 0.5
        generation = Generation(
            tokens=tuple(rng.randrange(10, 500) for _ in range(rng.choice([1, 5, 40, 200]))),
            sampling=SamplingParams(temperature=0.8 if drawn else 0.0, top_p=0.9 if drawn else 1.0, seed=seed),
            max_tokens=rng.choice([8, 100, 400]),
            ignore_eos=True,
        )
        leaves = rng.random() < 0.1
        async with runtime.stream(generation) as stream:
            async for event in stream:
                assert not isinstance(event, Failed), event
                if leaves and rng.random() < 0.05:
                    break


async def clear_pools(runtime: Runtime) -> None:
    """What MLX and the C library keep for reuse is no leak: have it given back before memory is read."""
    troupe = runtime._supervisor.troupe
    assert troupe is not None
    read_s = troupe.cast.memory_enforcer.sample.read_s
    troupe.cast.executor.ref.tell(SampleMemory(clear_pool=True))
    while troupe.cast.memory_enforcer.sample.read_s == read_s:  # noqa: ASYNC110  # nothing tells a client
        await asyncio.sleep(0.05)
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.mark.heavy
async def test_half_a_million_tokens(folder_of) -> None:
    """500,000 tokens in tenths: after the second, live device memory, the process and its objects stay within 2 %.

    The prefix cache is emptied first: how full it is at a moment is chance, and so is what its pages' buffers are
    rounded up by, which its budget does not count.
    """
    total = int(os.environ.get("SOAK_TOKENS", "500000"))
    folder = str(folder_of("llama"))
    async with Runtime(model=folder, page_tokens=64, prefix_cache_bytes=8 << 20, max_rows=64) as runtime:
        marks = []
        for part in range(1, 11):
            await asyncio.gather(*(churn(runtime, 1000 * part + one, total * part // 10) for one in range(48)))
            await idle(runtime)
            await empty_cache(runtime)
            await clear_pools(runtime)
            marks.append(memory(runtime))
            print(f"{runtime.statistics().completion_tokens} tokens: active, rss, objects {marks[-1]}", flush=True)
        assert runtime.statistics().completion_tokens >= total
        for at in range(3):
            early, late = marks[1][at], marks[-1][at]
            assert late <= early * 1.02, (at, marks)
