"""What the prefix cache is worth, and what its disk costs others. In process, on the demo model unless named otherwise.

    python -m benchmarks.prefix_cache [MODEL] [--steady-s 60]

First token of a long shared prefix and a short suffix: cold, from RAM, from disk after a restart; beside it the suffix
alone on an empty context, and both again as bare forwards of mlx-lm's model (of a folder): the floor.

Then the gaps of running streams, in windows that alternate between the same requests served from RAM with an idle disk,
and served from disk while every page is also written anew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from mlx_troupe.runtime.models.blas import load_blas

load_blas()

import mlx.core as mx  # noqa: E402  (BLAS must be loaded first)
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache  # noqa: E402

from mlx_troupe.runtime import Generation, Runtime, SamplingParams  # noqa: E402
from mlx_troupe.runtime.messages.cache_store import Tick  # noqa: E402

GREEDY = SamplingParams(temperature=0)
PREFIX_TOKENS = 1500
SUFFIX_TOKENS = (16, 64, 256)
REPEATS = 3
STREAMS = 4
WINDOW_S = 5.0
VISIT_S = 0.5
VISIT_TOKENS = 256
VISITORS = 8


def ids(count: int, seed: object) -> list[int]:
    """Token ids that every model of the tests has."""
    rng = random.Random(str(seed))
    return [rng.randrange(100, 400) for _ in range(count)]


async def first_token_s(runtime: Runtime, tokens: list[int], *, cache: bool = True) -> tuple[float, int]:
    """Seconds to the first token, and how many prompt tokens were cached."""
    generation = Generation(tokens=tuple(tokens), sampling=GREEDY, max_tokens=1, ignore_eos=True, cache=cache)
    began_s = time.perf_counter()
    usage = (await runtime.complete(generation)).choices[0].usage
    assert usage is not None
    return time.perf_counter() - began_s, usage.cached_tokens


async def settled(runtime: Runtime) -> Any:
    """The cache's core, when nothing is under way."""
    core = runtime._supervisor.troupe.cast.cache_store.core  # type: ignore[union-attr]
    while not core.idle:  # noqa: ASYNC110 - a benchmark looks in from outside
        await asyncio.sleep(0.01)
    return core


async def median_s(runtime: Runtime, prefix: list[int], suffix: int, tag: str, *, cache: bool = True) -> float:
    """Median seconds to the first token over suffixes that differ from their first token on."""
    found = []
    for number in range(REPEATS):
        tokens = [*prefix, 400 + number, *ids(suffix - 1, f"{tag} {suffix} {number}")]
        found.append((await first_token_s(runtime, tokens, cache=cache))[0])
    return statistics.median(found)


class Bare:
    """The same forwards with mlx-lm's model alone, the prefix in its cache already: no store, no scheduler.

    Uses the runtime's attention for CPUs where that is in force: it is the process's.
    """

    def __init__(self, folder: str, prefix: list[int]) -> None:
        from mlx_lm.utils import load_model

        self._model: Any = load_model(Path(folder))[0]
        self._model.set_dtype(mx.float32)
        self._filled = make_prompt_cache(self._model)
        for start in range(0, len(prefix), 512):
            self._forward_s(prefix[start : start + 512], self._filled)

    def first_token_s(self, suffix: int, tag: str, *, after_prefix: bool) -> float:
        """Median seconds of one forward of the suffix."""
        found = []
        for number in range(REPEATS):
            tokens = ids(suffix, f"{tag} {suffix} {number}")
            found.append(self._forward_s(tokens, self._filled if after_prefix else make_prompt_cache(self._model)))
            if after_prefix:
                trim_prompt_cache(self._filled, suffix)
        return statistics.median(found)

    def _forward_s(self, tokens: list[int], cache: Any) -> float:
        began_s = time.perf_counter()
        mx.eval(self._model(mx.array([tokens]), cache=cache)[:, -1].argmax(-1), [layer.state for layer in cache])
        return time.perf_counter() - began_s


async def first_tokens(model: str, folder: Path, *, bare: bool) -> dict[str, Any]:
    """Cold, RAM and disk; `bare` adds the floor, for which the model must be a folder."""
    prefix = ids(PREFIX_TOKENS, "prefix")
    out: dict[str, Any] = {"prefix_tokens": PREFIX_TOKENS}
    async with Runtime(model=model, cache_dir=str(folder), cache_disk_bytes=8 << 30) as runtime:
        await first_token_s(runtime, ids(40, "warm"), cache=False)
        cold_s, _ = await first_token_s(runtime, [*prefix, *ids(16, "cold")])
        out["cold_s"] = cold_s
        floor = Bare(model, prefix) if bare else None
        for suffix in SUFFIX_TOKENS:
            alone_s = await median_s(runtime, [], suffix, "alone", cache=False)
            ram_s = await median_s(runtime, prefix, suffix, "ram")
            out[f"suffix_{suffix}"] = {"alone_s": alone_s, "ram_s": ram_s, "ratio": ram_s / alone_s}
            if floor is not None:
                alone_s = floor.first_token_s(suffix, "alone", after_prefix=False)
                after_s = floor.first_token_s(suffix, "ram", after_prefix=True)
                out[f"suffix_{suffix}"] |= {
                    "bare_alone_s": alone_s,
                    "bare_ram_s": after_s,
                    "bare_ratio": after_s / alone_s,
                }
        await settled(runtime)
    async with Runtime(model=model, cache_dir=str(folder), cache_disk_bytes=8 << 30) as runtime:
        await first_token_s(runtime, ids(40, "warm"), cache=False)
        disk_s, cached = await first_token_s(runtime, [*prefix, 450, *ids(15, "disk")])
        waited_s = runtime.statistics().cache.restore_s
    return out | {"disk_s": disk_s, "disk_cached": cached, "restore_s": waited_s, "disk_of_cold": disk_s / cold_s}


async def stream(runtime: Runtime, number: int, gaps: dict[str, list[float]], mode: list[str]) -> None:
    """Decode for ever and note the gaps under the mode in force."""
    while True:
        tokens = tuple(ids(8, f"stream {number}"))
        generation = Generation(tokens=tokens, sampling=GREEDY, max_tokens=900, ignore_eos=True, cache=False)
        async with runtime.stream(generation) as events:
            last_s: float | None = None
            while await events.take():
                now_s = time.perf_counter()
                if last_s is not None:
                    gaps[mode[0]].append(now_s - last_s)
                last_s = now_s


async def visits(runtime: Runtime, mode: list[str]) -> None:
    """Requests of stored prefixes; in disk mode RAM is emptied before each, and what it restored is written again."""
    core = await settled(runtime)
    number = 0
    while True:
        began_s = time.perf_counter()
        prompt = ids(VISIT_TOKENS + 1, f"visit {number % VISITORS}")
        if mode[0] == "disk":
            core.reclaim(1 << 50)
        await first_token_s(runtime, prompt)
        if mode[0] == "disk":
            found = core.tree.match(-(1 << 40), prompt, VISIT_TOKENS)
            core.unlease(-(1 << 40))
            for page_id in found.pages:
                core.tree.lose_disk(core.tree.page(page_id))
            core.spill.stored(found.pages)
            runtime._supervisor.troupe.cast.cache_store.ref.tell(Tick())  # type: ignore[union-attr]
            await settled(runtime)
        number += 1
        await asyncio.sleep(max(0.0, VISIT_S - (time.perf_counter() - began_s)))


async def steady(model: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Gaps of running streams with the disk idle and busy."""
    gaps: dict[str, list[float]] = {"warm-up": [], "ram": [], "disk": []}
    mode = ["warm-up"]
    async with Runtime(model=model, cache_dir=str(folder), cache_disk_bytes=8 << 30) as runtime:
        for number in range(VISITORS):
            await first_token_s(runtime, ids(VISIT_TOKENS + 1, f"visit {number}"))
        await settled(runtime)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stream(runtime, n, gaps, mode)) for n in range(STREAMS)]
            tasks.append(group.create_task(visits(runtime, mode)))
            await asyncio.sleep(WINDOW_S)
            before = runtime.statistics().cache
            until_s = time.perf_counter() + 2 * seconds
            while time.perf_counter() < until_s:
                mode[0] = "disk" if mode[0] == "ram" else "ram"
                await asyncio.sleep(WINDOW_S)
            after = runtime.statistics().cache
            for task in tasks:
                task.cancel()
    named = {
        name: {"mean_s": statistics.fmean(found), "median_s": statistics.median(found), "count": len(found)}
        for name, found in gaps.items()
        if name != "warm-up"
    }
    return {
        **named,
        "slowed_mean": named["disk"]["mean_s"] / named["ram"]["mean_s"] - 1,
        "slowed_median": named["disk"]["median_s"] / named["ram"]["median_s"] - 1,
        "spilled_pages": after.spilled_pages - before.spilled_pages,
        "restored_pages": after.restored_pages - before.restored_pages,
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--steady-s", type=float, default=60.0, help="busy time of the second part; 0 leaves it out")
    parser.add_argument("--no-first-token", action="store_true", help="leave out the first part")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {}
        if not arguments.no_first_token:
            found["first_token"] = asyncio.run(
                first_tokens(arguments.model, Path(folder) / "a", bare=Path(arguments.model).is_dir())
            )
            print(json.dumps(found, indent=1), flush=True)
        if arguments.steady_s:
            found["steady"] = asyncio.run(steady(arguments.model, Path(folder) / "b", arguments.steady_s))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
