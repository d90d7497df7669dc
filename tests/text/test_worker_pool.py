"""The invariants of worker_pool, each under its name."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mlx_troupe.runtime.errors import NotReady, Overloaded
from mlx_troupe.runtime.text.worker_pool import WorkerPool


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pool-under-test")]


def made(*, threads=2, max_queued=8, prepare=threading.get_ident) -> WorkerPool:
    return WorkerPool(prepare, threads=threads, max_queued=max_queued, name="pool-under-test")


class Gate:
    """A job that says when it runs and waits to be let on."""

    def __init__(self):
        self.running = threading.Event()
        self.open = threading.Event()

    def __call__(self, state):
        self.running.set()
        assert self.open.wait(30)
        return state

    async def entered(self):
        assert await asyncio.to_thread(self.running.wait, 30)


async def test_each_thread_has_a_state_of_its_own():
    pool, first, second = made(), Gate(), Gate()
    tasks = [asyncio.create_task(pool.run(gate)) for gate in (first, second)]
    await first.entered()
    await second.entered()
    first.open.set()
    second.open.set()
    assert len(set(await asyncio.gather(*tasks))) == 2
    pool.close()
    assert alive() == []


async def test_long_jobs_leave_a_thread():
    pool, running, waiting = made(), Gate(), Gate()
    tasks = [asyncio.create_task(pool.run(gate, long=True)) for gate in (running, waiting)]
    await running.entered()
    assert await pool.run(lambda _: "short", long=False) == "short"
    assert not waiting.running.is_set()
    running.open.set()
    await waiting.entered()  # its turn came when the first one ended
    waiting.open.set()
    await asyncio.gather(*tasks)
    pool.close()


async def test_a_single_thread_takes_long_jobs():
    pool = made(threads=1)
    assert await pool.run(lambda _: "long", long=True) == "long"
    pool.close()


async def test_full_queue_refuses():
    pool, gate = made(threads=1, max_queued=2), Gate()
    tasks = [asyncio.create_task(pool.run(gate))]
    await gate.entered()
    tasks += [asyncio.create_task(pool.run(lambda _: "queued")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await pool.run(lambda _: "one too many")
    assert not isinstance(caught.value, NotReady)
    gate.open.set()
    assert (await asyncio.gather(*tasks))[1:] == ["queued", "queued"]
    pool.close()


async def test_cancelled_job_is_skipped():
    pool, gate, ran = made(threads=1, max_queued=1), Gate(), []
    first = asyncio.create_task(pool.run(gate))
    await gate.entered()
    left = asyncio.create_task(pool.run(lambda _: ran.append("left")))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    stays = asyncio.create_task(pool.run(lambda _: ran.append("stays")))  # the place is free again
    await asyncio.sleep(0)
    first.cancel()  # while it runs: its result is dropped
    gate.open.set()
    await stays
    assert ran == ["stays"]
    assert left.cancelled()
    assert (await asyncio.gather(first, return_exceptions=True))[0].__class__ is asyncio.CancelledError
    pool.close()


async def test_close_answers_everyone():
    pool, gate = made(threads=1), Gate()
    running, queued = asyncio.create_task(pool.run(gate)), asyncio.create_task(pool.run(gate))
    await gate.entered()
    await asyncio.sleep(0)
    closing = asyncio.create_task(asyncio.to_thread(pool.close))
    with pytest.raises(NotReady):
        await queued
    gate.open.set()
    await closing
    assert isinstance(await running, int)
    assert alive() == []
    pool.close()
    with pytest.raises(NotReady):
        await pool.run(gate)


async def test_an_error_reaches_its_caller_only():
    pool = made(threads=1)
    with pytest.raises(ZeroDivisionError):
        await pool.run(lambda _: 1 // 0)
    assert await pool.run(lambda _: "next") == "next"
    pool.close()


def test_a_failed_start_leaves_no_thread():
    calls = []

    def prepare():
        calls.append(1)
        if len(calls) == 2:
            raise OSError("no tokenizer")

    with pytest.raises(OSError, match="no tokenizer"):
        made(prepare=prepare)
    assert alive() == []
