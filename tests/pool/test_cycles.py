"""Models that come and go for a long time: nothing is left behind, and the process does not end."""

from __future__ import annotations

import asyncio
import gc
import threading

import psutil
import pytest

from tests.models.tiny import build_tiny

from .test_sockets import pooled, serving

CYCLES = 40
WARM = 10
GROWTH_BYTES = 40 << 20


@pytest.mark.heavy
async def test_loads_and_unloads_under_streams_leave_nothing(tmp_path, capsys):
    folders = {
        name: build_tiny(arch, tmp_path / name) for name, arch in (("a", "llama"), ("b", "qwen3"), ("c", "lfm2"))
    }
    models = [pooled(folders["a"], "a", pin=True), pooled(folders["b"], "b"), pooled(folders["c"], "c")]
    sizes, threads = [], []
    async with serving(*models, max_loaded_models=2) as user:
        text = await user.stream("a", 40)
        texts = {name: await user.stream(name, 20) for name in ("b", "c")}
        for cycle in range(CYCLES):
            name = "bc"[cycle % 2]
            async with asyncio.TaskGroup() as group:
                one, other = group.create_task(user.stream("a", 40)), group.create_task(user.stream(name, 20))
            assert (one.result(), other.result()) == (text, texts[name])
            gc.collect()
            sizes.append(psutil.Process().memory_info().rss)
            threads.append(threading.active_count())
        unloads = (await user.pool.status()).unloads
    with capsys.disabled():
        print(f"\n{unloads} unloads; MiB {[size >> 20 for size in sizes[::10]]}; {threads[-1]} threads")
    assert unloads >= CYCLES - 2
    assert sizes[-1] - sizes[WARM] < GROWTH_BYTES
    assert max(threads[WARM:]) <= max(threads[:WARM]) + 2
