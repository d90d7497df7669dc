"""A hit gives what a miss gives, token for token, for every cache kind: from RAM, after eviction, after a restart."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from mlx_troupe.runtime.loading import on_thread
from mlx_troupe.runtime.messages.cache_store import Reclaim

from .conftest import CHUNK, PAGE, TABLE, ask

if TYPE_CHECKING:
    from mlx_troupe.runtime import Runtime

LENGTHS = {
    "page-1": PAGE - 1,
    "page": PAGE,
    "page+1": PAGE + 1,
    "2pages": 2 * PAGE,
    "3chunks+1": 3 * CHUNK + 1,
}
COUNT = 12


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(10, 500) for _ in range(length)]


def plain(architecture: str) -> bool:
    """Whether every layer can be cut."""
    return architecture in {"llama", "qwen3", "deepseek_v2", "deepseek_v3"}


async def settled(runtime: Runtime) -> None:
    """Let stores and spills come to rest."""
    troupe: Any = runtime._supervisor.troupe
    while not troupe.cast.cache_store.core.idle:  # noqa: ASYNC110 - threads of the real engine and disk
        await asyncio.sleep(0.002)


async def evict(runtime: Runtime) -> None:
    """Give up all pages in RAM."""
    troupe: Any = runtime._supervisor.troupe
    troupe.cast.cache_store.ref.tell(Reclaim(1 << 40))
    await quiet(runtime)


async def quiet(runtime: Runtime) -> None:
    """Let the actors have their turns, and the engine's thread do what they told it."""
    loaded: Any = runtime._supervisor.loaded
    for _ in range(10):
        await asyncio.sleep(0)
    await on_thread(loaded.thread, lambda: None)


async def check_integrity(runtime: Runtime) -> None:
    """Idle, the engine holds the tree's pages and nothing else."""
    await settled(runtime)
    await quiet(runtime)
    troupe: Any = runtime._supervisor.troupe
    loaded: Any = runtime._supervisor.loaded
    troupe.cast.cache_store.core.check_integrity(loaded.engine.shelf.page_ids)
    assert troupe.cast.cache_store.core.tree.leased == 0
    assert not loaded.engine.shelf.rows_aside


@pytest.mark.parametrize("architecture", TABLE)
async def test_lengths_repeats_and_partings(architecture, runtime_of, alone) -> None:
    """Every length: cold, the same again, parting inside a page, at a page's start, and going on."""
    async with runtime_of(architecture) as runtime:
        for name, length in LENGTHS.items():
            prompt = prompt_of(length)
            cases = {
                "cold": prompt,
                "again": prompt,
                "inside": [*prompt[: length - 3], *prompt_of(9, 1)],
                "at a page": [*prompt[: length // PAGE * PAGE], *prompt_of(PAGE + 5, 2)],
                "goes on": [*prompt, *prompt_of(2 * PAGE + 3, 3)],
            }
            for case, tokens in cases.items():
                said, cached = await ask(runtime, tokens, COUNT)
                assert said == alone(architecture, tokens, COUNT), f"{name}: {case}"
                if case == "again":
                    assert cached == length - 1, f"{name}: an exact repeat is an exact hit"
                if case == "inside" and plain(architecture):
                    assert cached >= length - 3, f"{name}: the slice of a page is used"
                if case == "at a page" and length > PAGE:
                    assert cached >= length // PAGE * PAGE - PAGE, name
        await check_integrity(runtime)


@pytest.mark.parametrize("architecture", TABLE)
async def test_a_conversation_of_six_turns(architecture, runtime_of, alone) -> None:
    """Each turn's prompt is the last one's, its output, and more."""
    async with runtime_of(architecture) as runtime:
        history, before = prompt_of(37), 1
        for turn in range(6):
            said, cached = await ask(runtime, history, COUNT)
            assert said == alone(architecture, history, COUNT), f"turn {turn}"
            assert cached >= before - 1, f"turn {turn}: the last turn's prompt is known"
            before = len(history)
            history = [*history, *said, *prompt_of(11, turn)]
        await check_integrity(runtime)


@pytest.mark.parametrize("architecture", TABLE)
async def test_a_busy_batch(architecture, runtime_of, alone) -> None:
    """Twelve at once over three families of prefixes, twice, in a cache too small for all."""
    families = [prompt_of(length, 7) for length in (40, 65, 100)]
    work = [[*families[n % 3][: 100 - 9 * (n % 4)], *prompt_of(3 + n, n)] for n in range(12)]
    async with runtime_of(architecture, prefix_cache_bytes=300_000) as runtime:
        for _ in range(2):
            found = await asyncio.gather(*(ask(runtime, prompt, COUNT) for prompt in work))
            for prompt, (said, _) in zip(work, found, strict=True):
                assert said == alone(architecture, prompt, COUNT)
        assert runtime.statistics().cache.hit_tokens > 0
        await check_integrity(runtime)


@pytest.mark.parametrize("architecture", TABLE)
async def test_after_eviction_and_after_a_restart(architecture, runtime_of, alone) -> None:
    """Pages that only the disk has come back, in the same life and in the next."""
    prompt = prompt_of(3 * CHUNK + 1)
    longer = [*prompt, *prompt_of(5, 1)]
    for life in range(2):
        async with runtime_of(architecture, disk=True) as runtime:
            if life == 0:
                assert (await ask(runtime, prompt, COUNT))[1] == 0
                await settled(runtime)
            await evict(runtime)
            before = runtime.statistics().cache
            assert before.ram_pages == 0
            assert before.disk_pages > 0
            for tokens, least in ((prompt, len(prompt) - 1), (longer, len(prompt) - 1)):
                said, cached = await ask(runtime, tokens, COUNT)
                assert said == alone(architecture, tokens, COUNT), f"life {life}"
                assert cached >= least, f"life {life}"
            assert runtime.statistics().cache.hits_disk >= 1
            await check_integrity(runtime)
