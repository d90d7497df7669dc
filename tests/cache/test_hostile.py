"""The prefix cache under attack: a crowd of clients, tiny budgets, a failing disk, vanishing pages, failing forwards.

Whatever happens, an answer that comes is mlx-lm's own, the cache is whole afterwards, and its budgets held.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import sqlite3
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from mlx_troupe.runtime import Generation, Runtime
from mlx_troupe.runtime.engine.kv.batch import RowBatch
from mlx_troupe.runtime.engine.kv.solo import SoloBatch
from mlx_troupe.runtime.engine.kv.staged import StagedRow
from mlx_troupe.runtime.errors import TroupeError
from mlx_troupe.runtime.messages.cache_store import PagesLost, Reclaim

from .conftest import GREEDY, PAGE, TABLE
from .test_hit_equals_miss import check_integrity, prompt_of
from .test_runtime import tier_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COUNT = 10
CLIENTS = 8
FILE_SLACK = 32 << 10


def prompts(seed: int) -> list[list[int]]:
    """Three families of prompts that part at and beside page boundaries, some of them other prompts' starts."""
    rng = random.Random(f"prompts {seed}")
    out = []
    for family in range(3):
        trunk = prompt_of(rng.randrange(5 * PAGE, 9 * PAGE), family + 10 * seed)
        for branch in range(5):
            cut = rng.choice([rng.randrange(1, len(trunk)), rng.randrange(1, len(trunk) // PAGE) * PAGE])
            out.append([*trunk[:cut], *prompt_of(rng.randrange(1, 2 * PAGE), branch + 100 * family)])
        out += [trunk, trunk[: rng.randrange(2, len(trunk))]]
    return out


class BadDisk:
    """Fails now and then, at any point."""

    def __init__(self, rng: random.Random, share: float) -> None:
        self.share = share
        self._rng = rng

    def reached(self, point: str, /) -> None:
        if self._rng.random() < self.share:
            if point in ("row", "index"):
                raise sqlite3.OperationalError("database is locked")
            raise OSError(self._rng.choice([errno.ENOSPC, errno.EIO, errno.EROFS]), "injected")


class Attack:
    """One life of a runtime and those who wish it ill."""

    def __init__(self, runtime: Runtime, rng: random.Random, work: list[list[int]], expect: Callable[..., list[int]]):
        self.runtime = runtime
        self.rng = rng
        self.work = work
        self.expect = expect
        self.answered = self.refused = 0
        self.vanished: set[int] = set()

    async def run(self, requests: int) -> None:
        villain = asyncio.create_task(self._villain())
        try:
            await asyncio.gather(*(self._client(requests) for _ in range(CLIENTS)))
        finally:
            villain.cancel()
            with suppress(asyncio.CancelledError):
                await villain
            supervisor: Any = self.runtime._supervisor
            supervisor.troupe.cast.cache_store.ref.tell(PagesLost(tuple(self.vanished)))  # those nobody has missed

    async def _client(self, requests: int) -> None:
        for _ in range(requests):
            tokens = self.rng.choice(self.work)
            asked = Generation(
                tokens=tuple(tokens),
                sampling=GREEDY,
                max_tokens=self.rng.randrange(1, COUNT + 1),
                ignore_eos=True,
                n=self.rng.choice([1, 1, 1, 3]),
                cache=self.rng.random() < 0.9,
                cache_salt=self.rng.choice(["", "", "", "salt"]),
            )
            if self.rng.random() < 0.25:
                await self._leave_early(asked)
            else:
                await self._check(asked, tokens)

    async def _check(self, asked: Generation, tokens: list[int]) -> None:
        try:
            answer = await self.runtime.complete(asked)
        except TroupeError:
            self.refused += 1
            return
        self.answered += 1
        for choice in answer.choices:
            assert list(choice.tokens) == self.expect(tokens)[: asked.max_tokens], (len(tokens), choice.usage)

    async def _leave_early(self, asked: Generation) -> None:
        async def reader() -> None:
            async with self.runtime.stream(asked) as events:
                for _ in range(self.rng.randrange(4)):
                    await events.take()

        task = asyncio.create_task(reader())
        await asyncio.sleep(self.rng.choice([0, 0, 0.001, 0.01, 0.05]))
        task.cancel()
        with suppress(asyncio.CancelledError, TroupeError):
            await task

    async def _villain(self) -> None:
        """Evicts, damages files, and makes pages vanish from the engine."""
        supervisor: Any = self.runtime._supervisor
        store = supervisor.troupe.cast.cache_store
        engine, thread = supervisor.loaded.engine, supervisor.loaded.thread
        while True:
            await asyncio.sleep(self.rng.random() * 0.03)
            match self.rng.randrange(4):
                case 0:
                    store.ref.tell(Reclaim(self.rng.choice([1, 20_000, 1 << 40])))
                case 1:
                    self._damage(tier_of(self.runtime).folder)
                case 2 if engine.shelf.page_ids:
                    page = self.rng.choice(sorted(engine.shelf.page_ids))
                    self.vanished.add(page)
                    thread.submit(lambda page=page: engine.drop((page,)))
                case _:
                    pass

    def _damage(self, folder: Path) -> None:
        paths = sorted(folder.glob("*.page"))
        if not paths:
            return
        path = self.rng.choice(paths)
        with suppress(OSError):  # it may have gone meanwhile
            match self.rng.randrange(3):
                case 0:
                    path.unlink()
                case 1:
                    os.truncate(path, path.stat().st_size // 2)
                case _:
                    content = bytearray(path.read_bytes())
                    content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
                    path.write_bytes(content)


def failing_now_and_then(monkeypatch: pytest.MonkeyPatch, rng: random.Random, share: float) -> list[int]:
    """Chunks and decode steps raise by chance; returns a count of one."""
    count = [0]

    def wrap(kind: type, method: str) -> None:
        original = getattr(kind, method)

        def call(self: Any, *args: Any, **named: Any) -> Any:
            if rng.random() < share:
                count[0] += 1
                raise RuntimeError("injected")
            return original(self, *args, **named)

        monkeypatch.setattr(kind, method, call)

    wrap(StagedRow, "append")
    wrap(StagedRow, "restore")
    wrap(RowBatch, "forward")
    wrap(SoloBatch, "forward")
    return count


async def at_rest(runtime: Runtime) -> None:
    """Until the last cancelled row has gone; it must."""
    troupe: Any = runtime._supervisor.troupe
    async with asyncio.timeout(30):
        while not (troupe.cast.prefill.core.idle and troupe.cast.decode.core.idle):  # noqa: ASYNC110 - as in `settled`
            await asyncio.sleep(0.002)
        assert runtime.statistics().waiting == 0


async def attack(
    architecture: str, seed: int, runtime_of, alone, monkeypatch, *, lives: int, requests: int, faults: float
) -> None:
    rng = random.Random(f"{architecture} {seed} {faults}")
    work = prompts(seed)
    known: dict[tuple[int, ...], list[int]] = {}

    def expect(tokens: list[int]) -> list[int]:
        key = tuple(tokens)
        if key not in known:
            known[key] = alone(architecture, tokens, COUNT)
        return known[key]

    for tokens in work:
        expect(tokens)
    answered = 0
    for life in range(lives):
        settings: dict[str, Any] = {
            "prefix_cache_bytes": rng.choice([150_000, 400_000, 4_000_000]),
            "cache_disk_bytes": rng.choice([200_000, 1 << 30]),
            "cache_spill": rng.choice(["write-through", "write-back"]),
            "cache_spill_queue": rng.choice([1, 4, 64]),
            "cache_restore_timeout_s": rng.choice([0.001, 0.02, 5.0]),
            "cache_max_stores": rng.choice([1, 16]),
            "overlap": rng.choice(["launch", "build", "off"]),
            "prefill_chunk_tokens": rng.choice([7, 48]),
            "cache_flush_timeout_s": rng.choice([0.001, 20.0]),
        }
        async with runtime_of(architecture, disk=True, **settings) as runtime:
            with monkeypatch.context() as patch:
                tier = tier_of(runtime)
                tier._faults = BadDisk(rng, 0.05)
                if tier._index is not None:
                    tier._index._faults = tier._faults
                failed = failing_now_and_then(patch, rng, faults) if faults else [0]
                crowd = Attack(runtime, rng, work, expect)
                await crowd.run(requests)
                tier._faults.share = 0.0
                await at_rest(runtime)
            answered += crowd.answered
            assert failed[0] or not crowd.refused, f"life {life}: {settings}"
            await check_integrity(runtime)
            now = runtime.statistics().cache
            assert now.ram_bytes <= settings["prefix_cache_bytes"]
            on_disk = sum(path.stat().st_size for path in tier.folder.glob("*.page"))
            assert on_disk <= settings["cache_disk_bytes"] + FILE_SLACK
    assert answered > lives * requests * CLIENTS // 4


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
async def test_every_answer_is_right_under_attack(architecture, runtime_of, alone, monkeypatch) -> None:
    await attack(architecture, 0, runtime_of, alone, monkeypatch, lives=2, requests=4, faults=0.0)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
async def test_every_answer_is_right_while_forwards_fail(architecture, runtime_of, alone, monkeypatch) -> None:
    await attack(architecture, 1, runtime_of, alone, monkeypatch, lives=1, requests=4, faults=0.02)


@pytest.mark.heavy
@pytest.mark.parametrize("faults", [0.0, 0.02])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("architecture", TABLE)
async def test_every_answer_is_right_under_long_attacks(
    architecture, seed, faults, runtime_of, alone, monkeypatch
) -> None:
    await attack(architecture, seed, runtime_of, alone, monkeypatch, lives=4, requests=8, faults=faults)
