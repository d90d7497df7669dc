"""Faults on the real MLX thread: whatever happens, others end as they should, and the next request works."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

from mlx_troupe.runtime import Generation, NotReady, Runtime, SamplingParams, TextDelta, TroupeError
from mlx_troupe.runtime.messages.decode import Preempt

if TYPE_CHECKING:
    from collections.abc import Callable

GREEDY = SamplingParams(temperature=0)
PROMPTS = [[20 + index, 30, 40 + index] * (1 + 9 * index) for index in range(4)]
TOKENS = 30


async def listen(runtime: Runtime, prompt: list[int], started: Callable[[], None] = lambda: None) -> list[int]:
    """Stream one greedy request; every token its listener heard."""
    generation = Generation(tokens=tuple(prompt), sampling=GREEDY, max_tokens=TOKENS, ignore_eos=True)
    heard: list[int] = []
    async with runtime.stream(generation) as stream:
        async for event in stream:
            if isinstance(event, TextDelta):
                heard += event.tokens
                if len(heard) == 5:
                    started()
            elif hasattr(event, "code"):
                raise TroupeError(event.message, code=event.code)
    return heard


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110  # nothing tells a client either
            await asyncio.sleep(0.001)


class Sabotage:
    """Strikes once inside the batch's next forward, when armed."""

    def __init__(self, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
        assert runtime._supervisor.loaded is not None
        engine: Any = runtime._supervisor.loaded.engine
        forward = engine._batch.__class__.forward
        self.harm: Callable[[mx.array], mx.array] | None = None
        self.struck = 0

        def sabotaged(batch: Any, tokens: mx.array) -> mx.array:
            logits = forward(batch, tokens)
            harm, self.harm = self.harm, None
            if harm is None:
                return logits
            self.struck += 1
            return harm(logits)

        monkeypatch.setattr(engine._batch.__class__, "forward", sabotaged)


def raise_it(_: mx.array) -> mx.array:
    raise RuntimeError("injected")


def out_of_memory(_: mx.array) -> mx.array:
    raise RuntimeError("[metal::malloc] Unable to allocate 99 bytes.")


def spoil_first(logits: mx.array) -> mx.array:
    spoilt = mx.full((1, *logits.shape[1:]), float("nan"), logits.dtype)
    return mx.concatenate([spoilt, logits[1:]])


@pytest.mark.parametrize("overlap", ["launch", "build", "off"])
@pytest.mark.parametrize("harm", [raise_it, out_of_memory, spoil_first])
async def test_a_fault_in_a_step_costs_nobody_a_token(harm, overlap, folder_of, alone, monkeypatch) -> None:
    async with Runtime(model=str(folder_of("llama")), overlap=overlap, page_tokens=16) as runtime:
        sabotage = Sabotage(runtime, monkeypatch)

        def strike() -> None:
            sabotage.harm = harm

        streams = [
            listen(runtime, prompt, strike if index == 0 else lambda: None) for index, prompt in enumerate(PROMPTS)
        ]
        found = await asyncio.gather(*streams)
        assert sabotage.struck == 1
        assert runtime.statistics().requeued == (1 if harm is spoil_first else 4)
        assert runtime.readiness().ready
    assert found == [alone("llama", prompt, TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("architecture", ["gemma3_text", "qwen3_next"])
async def test_other_cache_kinds_recover_too(architecture, folder_of, alone, monkeypatch) -> None:
    async with Runtime(model=str(folder_of(architecture)), page_tokens=16) as runtime:
        sabotage = Sabotage(runtime, monkeypatch)

        def strike() -> None:
            sabotage.harm = raise_it

        found = await asyncio.gather(
            *(listen(runtime, prompt, strike) for prompt in PROMPTS[:1]),
            *(listen(runtime, prompt) for prompt in PROMPTS[1:]),
        )
        assert sabotage.struck == 1
    assert found == [alone(architecture, prompt, TOKENS) for prompt in PROMPTS]


async def test_seeded_sampling_goes_on_where_it_was(folder_of, monkeypatch) -> None:
    """Penalties, seed and log-probabilities after a retry are those without one."""
    params = SamplingParams(temperature=1.1, top_p=0.9, seed=5, repetition_penalty=1.3, top_logprobs=2)
    wanted = Generation(tokens=tuple(PROMPTS[2]), sampling=params, max_tokens=40, ignore_eos=True)
    async with Runtime(model=str(folder_of("llama")), prefix_cache_bytes=0) as runtime:
        sabotage = Sabotage(runtime, monkeypatch)
        plain = await runtime.complete(wanted)
        task = asyncio.create_task(runtime.complete(wanted))
        await until(lambda: runtime.statistics().completion_tokens >= 50)
        sabotage.harm = raise_it
        again = await task
    assert sabotage.struck == 1
    assert again.choices[0].tokens == plain.choices[0].tokens
    assert len(again.choices[0].logprobs or ()) == 40


@pytest.mark.parametrize("overlap", ["launch", "off"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next"])
async def test_preempted_rows_stay_equal(architecture, overlap, folder_of, alone) -> None:
    async with Runtime(model=str(folder_of(architecture)), overlap=overlap, page_tokens=16) as runtime:
        assert runtime._supervisor.troupe is not None
        decode = runtime._supervisor.troupe.cast.decode.ref
        found = await asyncio.gather(
            *(listen(runtime, prompt, lambda: decode.tell(Preempt("a test"))) for prompt in PROMPTS)
        )
        assert runtime.statistics().preempted >= 2
    assert found == [alone(architecture, prompt, TOKENS) for prompt in PROMPTS]


async def test_a_stop_under_load_tells_everybody_and_leaves_no_thread(folder_of) -> None:
    """Sixteen endless streams, a drain whose time is too short for them, and a new start."""
    before = set(threading.enumerate())
    for _ in range(2):
        async with Runtime(model=str(folder_of("llama"))) as runtime:
            tasks = await running(runtime, 16)
            await asyncio.wait_for(runtime.drain(0.2), 30)
            results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
            assert {getattr(result, "code", "") for result in results} == {"shutting_down"}
            with pytest.raises(NotReady):
                await listen(runtime, PROMPTS[0])
        left = {thread.name for thread in set(threading.enumerate()) - before}
        assert not {name for name in left if name.startswith(("mlx", "text"))}


async def assert_restarts(runtime: Runtime, tasks: list[asyncio.Task[list[int]]], expected: list[int]) -> None:
    """Everybody was answered, readiness turned red, and after the restart a request works."""
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert all(isinstance(result, TroupeError) for result in results)
    readiness = runtime.readiness()
    assert not readiness.ready
    assert readiness.reason == "restarting"
    with pytest.raises(NotReady) as caught:
        await listen(runtime, PROMPTS[0])
    assert caught.value.retry_after_s >= 1
    await until(lambda: runtime.readiness().ready)
    assert runtime.statistics().restarts == 1
    assert await listen(runtime, PROMPTS[0]) == expected


async def running(runtime: Runtime, count: int = 3) -> list[asyncio.Task[list[int]]]:
    generation = Generation(tokens=(20, 30), sampling=GREEDY, ignore_eos=True)

    async def one() -> list[int]:
        return list((await runtime.complete(generation)).choices[0].tokens)

    tasks = [asyncio.create_task(one()) for _ in range(count)]
    await until(lambda: runtime.statistics().running == count)
    return tasks


async def test_a_dead_engine_is_started_anew(folder_of, alone, monkeypatch) -> None:
    async with Runtime(model=str(folder_of("llama"))) as runtime:
        tasks = await running(runtime)

        def broken(*_: object) -> None:
            raise MemoryError("the device is gone")

        assert runtime._supervisor.loaded is not None
        monkeypatch.setattr(runtime._supervisor.loaded.engine, "run", broken)
        await assert_restarts(runtime, tasks, alone("llama", PROMPTS[0], TOKENS))


async def test_a_killed_thread_is_replaced(folder_of, alone) -> None:
    async with Runtime(model=str(folder_of("llama"))) as runtime:
        tasks = await running(runtime)

        def die() -> None:
            raise SystemExit

        assert runtime._supervisor.loaded is not None
        runtime._supervisor.loaded.thread.submit(die)
        await assert_restarts(runtime, tasks, alone("llama", PROMPTS[0], TOKENS))


async def test_a_step_that_hangs_is_given_up(folder_of, alone, monkeypatch) -> None:
    release = threading.Event()

    def hang(logits: mx.array) -> mx.array:
        release.wait(60)
        return logits

    try:
        async with Runtime(model=str(folder_of("llama")), step_timeout_s=0.2, hang_timeout_s=1.0) as runtime:
            sabotage = Sabotage(runtime, monkeypatch)
            tasks = await running(runtime)
            sabotage.harm = hang
            await until(lambda: runtime.readiness().reason == "stalled")
            await assert_restarts(runtime, tasks, alone("llama", PROMPTS[0], TOKENS))
    finally:
        release.set()


async def test_an_actors_death_restarts_too(folder_of, alone) -> None:
    async with Runtime(model=str(folder_of("llama"))) as runtime:
        tasks = await running(runtime)
        assert runtime._supervisor.troupe is not None
        runtime._supervisor.troupe.cast.cache_store.ref.tell("nonsense")  # type: ignore[arg-type]
        await assert_restarts(runtime, tasks, alone("llama", PROMPTS[0], TOKENS))
