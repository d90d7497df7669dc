"""The prefix cache behind the facade: faults of the disk, salts, opting out, warm-up, sharing, order of events."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sqlite3
from typing import Any

import pytest

from mlx_troupe.runtime import Generation, InvalidRequest
from mlx_troupe.runtime.metrics import PREFIX
from tests.models.tiny import build_tiny

from .conftest import GREEDY, PAGE, ask
from .test_hit_equals_miss import check_integrity, evict, prompt_of, settled

PROMPT = prompt_of(100)


def tier_of(runtime: Any) -> Any:
    """The disk tier of a running runtime."""
    return runtime._supervisor.troupe.cast.cache_store._disk._tier


class FailAlways:
    """Every write fails so."""

    def __init__(self, point: str, error: Exception) -> None:
        self._point, self._error = point, error

    def reached(self, point: str, /) -> None:
        if point == self._point:
            raise self._error


@pytest.mark.parametrize(
    ("point", "error"),
    [
        ("open", OSError(errno.EROFS, "Read-only file system")),
        ("write", OSError(errno.ENOSPC, "No space left on device")),
        ("fsync", OSError(errno.EIO, "Input/output error")),
        ("row", sqlite3.OperationalError("database is locked")),
        ("read", OSError(errno.EIO, "Input/output error")),
    ],
    ids=["read-only", "full", "fsync", "locked", "unreadable"],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
async def test_a_failing_disk_reaches_no_client(architecture, point, error, runtime_of, alone) -> None:
    async with runtime_of(architecture, disk=True) as runtime:
        tier = tier_of(runtime)
        tier._faults = tier._index._faults = FailAlways(point, error)
        for prompt in (PROMPT, PROMPT, [*PROMPT, 5, 6]):
            assert (await ask(runtime, prompt))[0] == alone(architecture, prompt, 12)
            await settled(runtime)
            await evict(runtime)
        counted = runtime.statistics().cache
        assert counted.disk_faults + counted.lost_pages > 0
        await check_integrity(runtime)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "deleted", "folder deleted", "swapped"])
async def test_damage_on_disk_is_a_miss(damage, runtime_of, alone) -> None:
    async with runtime_of("llama", disk=True) as runtime:
        await ask(runtime, PROMPT)
        await settled(runtime)
        await evict(runtime)
        folder = tier_of(runtime).folder
        paths = sorted(folder.glob("*.page"))
        assert len(paths) > 2
        for path in paths:
            match damage:
                case "truncated":
                    os.truncate(path, path.stat().st_size - 7)
                case "flipped":
                    content = bytearray(path.read_bytes())
                    content[len(content) // 2] ^= 1
                    path.write_bytes(content)
                case "deleted":
                    path.unlink()
                case "swapped":
                    path.write_bytes(paths[0].read_bytes() if path is not paths[0] else b"")
        if damage == "folder deleted":
            shutil.rmtree(folder.parent)
        for _ in range(2):
            said, cached = await ask(runtime, PROMPT)
            assert said == alone("llama", PROMPT, 12)
        assert cached == len(PROMPT) - 1, "computed once, then known again"
        await settled(runtime)
        await check_integrity(runtime)


async def test_another_model_shares_nothing_and_the_budget_is_for_both(runtime_of, alone, tmp_path) -> None:
    """The same architecture with other weights: neither RAM nor disk of the first serves it."""
    async with runtime_of("llama", disk=True) as runtime:
        await ask(runtime, PROMPT)
        await settled(runtime)
        first, held = tier_of(runtime).folder, runtime.statistics().cache.disk_bytes
    other = build_tiny("llama", tmp_path / "other", seed=9)
    async with runtime_of("llama", disk=True, model=str(other), cache_disk_bytes=held + 4096) as runtime:
        said, cached = await ask(runtime, PROMPT)
        assert cached == 0
        assert said != alone("llama", PROMPT, 12)
        await settled(runtime)
        assert runtime.statistics().cache.disk_bytes > 0
        assert not first.exists(), "pages of a model that is not served made room"


async def test_the_budget_holds_at_the_start(runtime_of) -> None:
    async with runtime_of("llama", disk=True) as runtime:
        for seed in range(3):
            await ask(runtime, prompt_of(100, seed))
        await settled(runtime)
        held, folder = runtime.statistics().cache.disk_bytes, tier_of(runtime).folder
    async with runtime_of("llama", disk=True, cache_disk_bytes=held // 2) as runtime:
        assert 0 < runtime.statistics().cache.disk_bytes <= held // 2
        await ask(runtime, prompt_of(20, 9))
        await settled(runtime)
        files = sum(path.stat().st_size for path in folder.glob("*.page"))
        assert files == runtime.statistics().cache.disk_bytes <= held // 2


@pytest.mark.parametrize("spill", ["write-through", "write-back"])
async def test_a_stop_brings_pages_to_disk(spill, runtime_of) -> None:
    async with runtime_of("llama", disk=True, cache_spill=spill) as runtime:
        await ask(runtime, PROMPT)
    async with runtime_of("llama", disk=True, cache_spill=spill) as runtime:
        assert (await ask(runtime, PROMPT))[1] == len(PROMPT) - 1


async def test_salts_never_share_and_opting_out_neither_gives_nor_takes(runtime_of, alone) -> None:
    async with runtime_of("llama", disk=True) as runtime:
        expected = alone("llama", PROMPT, 12)
        assert await ask(runtime, PROMPT, cache=False) == (expected, 0)
        assert await ask(runtime, PROMPT, cache_salt="one") == (expected, 0)
        assert await ask(runtime, PROMPT, cache_salt="two") == (expected, 0)
        assert await ask(runtime, PROMPT) == (expected, 0)
        assert await ask(runtime, PROMPT, cache=False) == (expected, 0)
        for salt in ("one", "two", ""):
            assert await ask(runtime, PROMPT, cache_salt=salt) == (expected, len(PROMPT) - 1)
        await settled(runtime)
        await evict(runtime)
        assert (await ask(runtime, PROMPT, cache_salt="three"))[1] == 0
        assert (await ask(runtime, PROMPT, cache_salt="one"))[1] == len(PROMPT) - 1


async def test_a_salted_request_does_not_wait_for_one_of_another_salt(runtime_of) -> None:
    """Timing tells nothing: it computes its own prefix, though the same tokens are being computed beside it."""
    long = prompt_of(900)
    async with runtime_of("llama") as runtime:
        results = await asyncio.gather(*(ask(runtime, long, 2, cache_salt=salt) for salt in ("a", "b", "a")))
        cached = [found for _, found in results]
        assert cached[0] == cached[1] == 0
        assert cached[2] >= len(long) - PAGE


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next"])
async def test_parallel_identical_prompts_and_choices_prefill_once(architecture, runtime_of, alone) -> None:
    prompt = prompt_of(200)
    async with runtime_of(architecture) as runtime:
        found = await asyncio.gather(*(ask(runtime, prompt) for _ in range(6)))
        assert all(said == alone(architecture, prompt, 12) for said, _ in found)
        saved = sum(cached for _, cached in found)
        assert saved >= 5 * (len(prompt) - 1 - PAGE)
        many = Generation(tokens=(*prompt, 9), sampling=GREEDY, max_tokens=4, ignore_eos=True, n=4)
        choices = (await runtime.complete(many)).choices
        assert len({choice.tokens for choice in choices}) == 1
        assert runtime.statistics().cache.queries == 7


async def test_a_prefix_is_shared_while_it_is_still_being_computed(runtime_of) -> None:
    """The second comes when the first has had a chunk or two: it takes the pages there are and waits for the rest."""
    prefix = prompt_of(1200)
    async with runtime_of("llama") as runtime:
        first = asyncio.create_task(ask(runtime, [*prefix, *prompt_of(40, 1)], 2))
        while not runtime.statistics().cache.stored_pages:  # noqa: ASYNC110 - the engine's own pace
            await asyncio.sleep(0.001)
        _, cached = await ask(runtime, [*prefix, *prompt_of(30, 2)], 2)
        assert (await first)[1] == 0
        assert cached >= len(prefix) - PAGE


async def test_warm_prompts_are_computed_at_start(runtime_of, tmp_path) -> None:
    path = tmp_path / "warm.jsonl"
    path.write_text(f'{PROMPT}\n\n"hello there"\n{{"messages": [{{"role": "user", "content": "hi"}}]}}\n')
    async with runtime_of("llama", warm_prompts=str(path)) as runtime:
        assert runtime.statistics().cache.queries == 3
        assert (await ask(runtime, PROMPT))[1] == len(PROMPT) - 1
    for text in ("nonsense", "{}", "[]", '["a"]'):
        path.write_text(text)
        with pytest.raises(InvalidRequest, match="warm"):
            async with runtime_of("llama", warm_prompts=str(path)):
                pass
    with pytest.raises(InvalidRequest, match="cannot be read"):
        async with runtime_of("llama", warm_prompts=str(tmp_path / "none")):
            pass


async def test_a_conversation_without_its_generation_prompt_is_found(runtime_of) -> None:
    """Models that need checkpoints have one where the next turn parts: at the start of the generation prompt."""
    turn = [{"role": "user", "content": "tell me something about the sea"}]
    later = [*turn, {"role": "assistant", "content": "Salt."}, {"role": "user", "content": "more"}]
    async with runtime_of("qwen3_next") as runtime:
        loaded: Any = runtime._supervisor.loaded
        first = await loaded.text.render_chat(turn)
        start = loaded.turns.turn_start(first)
        assert start is not None
        assert start < len(first)
        usages = []
        for messages in (turn, later):
            asked = Generation(messages=tuple(messages), sampling=GREEDY, max_tokens=3, ignore_eos=True)
            usages.append((await runtime.complete(asked)).choices[0].usage)
        assert usages[1].cached_tokens >= start


async def test_the_metrics_tell_of_both_tiers(runtime_of) -> None:
    async with runtime_of("llama", disk=True) as runtime:
        for _ in range(2):
            await ask(runtime, PROMPT)
            await settled(runtime)
            await evict(runtime)
        text = (await runtime.metrics()).decode()
    name = '{model_name="llama0"'
    values = {
        line.split(" ")[0].replace(name, "{"): float(line.split(" ")[-1])
        for line in text.splitlines()
        if line[0] != "#"
    }
    found = {
        key.removeprefix(PREFIX + "prefix_cache_"): value for key, value in values.items() if "prefix_cache" in key
    }
    by_label = {key.partition("{")[0]: value for key, value in found.items()}
    assert by_label["requests_total"] == 2
    assert by_label["saved_tokens_total"] == len(PROMPT) - 1
    assert 0 < by_label["spills_total"] <= by_label["stores_total"]
    assert by_label["restores_total"] > 0
    assert by_label["restore_seconds_total"] > 0
    assert any(key.startswith("found_total") and 'source="disk"' in key and value == 1 for key, value in found.items())
    assert any(key.startswith("bytes") and 'tier="disk"' in key and value > 0 for key, value in found.items())
    assert any(key.startswith("evictions_total") and 'tier="ram"' in key and value > 0 for key, value in found.items())


async def test_ready_only_when_the_prefixes_on_disk_are_known(runtime_of, monkeypatch) -> None:
    """Or the first requests after a restart find nothing."""
    seen = []

    async def opened(_: Any) -> None:
        seen.append(runtime.readiness())

    monkeypatch.setattr("mlx_troupe.actors.troupe.Troupe.cache_opened", opened)
    runtime = runtime_of("llama", disk=True)
    async with runtime:
        assert [readiness.ready for readiness in seen] == [False]
        assert runtime.readiness().ready
