"""What an embedder relies on."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import threading
from typing import TYPE_CHECKING

import pytest

from mlx_troupe.runtime import (
    Failed,
    Finished,
    Generation,
    InvalidRequest,
    NotReady,
    PrefillProgress,
    Runtime,
    SamplingParams,
    TextDelta,
    TroupeError,
)
from mlx_troupe.runtime.engine.kv.staged import StagedRow
from mlx_troupe.runtime.errors import ContextLengthExceeded, Overloaded, RequestCancelled
from tests.remote.hosting import served

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from mlx_troupe.runtime.service import Service

GREEDY = SamplingParams(temperature=0)


def prompts(count: int, *, seed: int = 0, lengths: tuple[int, ...] = (1, 3, 20, 70, 300, 600)) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 500) for _ in range(rng.choice(lengths))] for _ in range(count)]


@pytest.fixture(params=["local", "remote"])
def serving(request) -> Callable[[Runtime], AbstractAsyncContextManager[tuple[Service, Runtime]]]:
    """Enters a runtime, as itself and behind a socket: gives a Service to ask, and the runtime to look into."""
    return functools.partial(served, request.param)


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until something is so."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it never came to be")


async def tokens_of(service: Service, prompt: list[int], count: int, **options: object) -> list[int]:
    generation = Generation(tokens=tuple(prompt), sampling=GREEDY, max_tokens=count, ignore_eos=True, **options)
    return list((await service.complete(generation)).choices[0].tokens)


@pytest.mark.parametrize(
    ("architecture", "overlap", "serving"),
    [
        *itertools.product(["llama", "gemma3_text", "qwen3_next", "llama4"], ["auto", "build", "off"], ["local"]),
        ("llama", "auto", "remote"),
    ],
    indirect=["serving"],
)
async def test_many_at_once_equal_mlx_lm_alone(architecture, overlap, folder_of, alone, serving) -> None:
    """Requests arrive at random times through all actors; prefix cache on, pages of 64 tokens."""
    rng = random.Random(1)
    work = [(prompt, rng.randrange(1, 40)) for prompt in prompts(16, seed=5)]

    async def one(prompt: list[int], count: int) -> list[int]:
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)
        return await tokens_of(service, prompt, count)

    async with serving(
        Runtime(model=str(folder_of(architecture)), overlap=overlap, page_tokens=64, length_classes=(64, 256, 1024))
    ) as (service, runtime):
        found = await asyncio.gather(*(one(prompt, count) for prompt, count in work))
        again = await asyncio.gather(*(one(prompt, count) for prompt, count in work))
        statistics = runtime.statistics()
    expected = [alone(architecture, prompt, count) for prompt, count in work]
    assert found == expected
    assert again == expected
    assert statistics.running == statistics.waiting == statistics.prefilling == 0
    if architecture == "llama":
        assert statistics.cache.hit_tokens > 0


async def test_seeded_text_is_the_same_whatever_the_neighbours(folder_of, serving) -> None:
    """One seed, alone and in a crowd, twice: the same tokens."""
    wanted = Generation(
        tokens=(20, 30, 40), sampling=SamplingParams(temperature=1.2, top_p=0.9, seed=7), max_tokens=30, ignore_eos=True
    )
    async with serving(Runtime(model=str(folder_of("llama")))) as (service, _):
        first = await service.complete(wanted)
        crowd = [
            Generation(tokens=tuple(p), sampling=SamplingParams(temperature=0.9, seed=n), max_tokens=20)
            for n, p in enumerate(prompts(12, seed=2))
        ]
        second, *_ = await asyncio.gather(service.complete(wanted), *(service.complete(g) for g in crowd))
    assert first.choices[0].tokens == second.choices[0].tokens


async def test_unseeded_requests_differ(folder_of, serving) -> None:
    generation = Generation(tokens=(20, 30), sampling=SamplingParams(temperature=1.5), max_tokens=20, ignore_eos=True)
    async with serving(Runtime(model=str(folder_of("llama")))) as (service, _):
        one, two = await asyncio.gather(service.complete(generation), service.complete(generation))
    assert one.choices[0].tokens != two.choices[0].tokens


async def test_choices_share_one_prefill(folder_of, alone, monkeypatch, serving) -> None:
    prompt = prompts(1, lengths=(200,))[0]
    computed = 0
    append = StagedRow.append

    def counted(row: StagedRow, tokens: tuple[int, ...]) -> None:
        nonlocal computed
        computed += len(tokens)
        append(row, tokens)

    async with serving(Runtime(model=str(folder_of("llama")))) as (service, _):
        monkeypatch.setattr(StagedRow, "append", counted)
        generation = Generation(tokens=tuple(prompt), sampling=GREEDY, max_tokens=9, n=4, ignore_eos=True)
        completion = await service.complete(generation)
    assert [list(choice.tokens) for choice in completion.choices] == [alone("llama", prompt, 9)] * 4
    assert computed == 199
    assert completion.usage.completion_tokens == 36


async def test_stream_events_come_in_order(folder_of, serving) -> None:
    prompt = prompts(1, lengths=(600,))[0]
    events = []
    async with (
        serving(Runtime(model=str(folder_of("llama")), prefill_chunk_tokens=128)) as (service, _),
        service.stream(
            Generation(tokens=tuple(prompt), sampling=GREEDY, max_tokens=12, ignore_eos=True, request_id="me")
        ) as stream,
    ):
        assert (stream.request_id, stream.prompt_tokens) == ("me", 600)
        events = [event async for event in stream]
    kinds = [type(event) for event in events]
    progress = [event.done_tokens for event in events if isinstance(event, PrefillProgress)]
    assert progress == sorted(progress)
    assert len(progress) >= 4
    assert kinds[-1] is Finished
    assert kinds.count(Finished) == 1
    assert sum(len(event.tokens) for event in events if isinstance(event, TextDelta)) == 12
    assert events[-1].reason == "length"
    assert events[-1].usage.prompt_tokens == 600


async def test_leaving_a_stream_frees_its_row(folder_of, serving) -> None:
    async with serving(Runtime(model=str(folder_of("llama")))) as (service, runtime):
        async with service.stream(Generation(tokens=(20, 30), sampling=GREEDY, ignore_eos=True)) as stream:
            await stream.take()
        await until(lambda: not (runtime.statistics().running))
        assert runtime.statistics().finished == {"cancelled": 1}
        assert len(await tokens_of(service, [20, 30], 5)) == 5


async def test_cancel_by_id_ends_complete(folder_of, serving) -> None:
    async with serving(Runtime(model=str(folder_of("llama")))) as (service, runtime):
        task = asyncio.create_task(
            service.complete(Generation(tokens=(20, 30), sampling=GREEDY, ignore_eos=True, request_id="x"))
        )
        await until(lambda: runtime.statistics().running)
        service.cancel("x")
        with pytest.raises(RequestCancelled):
            await task


async def test_timeout_ends_with_what_there_is(folder_of, serving) -> None:
    async with serving(Runtime(model=str(folder_of("llama")))) as (service, _):
        generation = Generation(tokens=(20, 30), sampling=GREEDY, ignore_eos=True, timeout_s=0.3)
        completion = await service.complete(generation)
    assert completion.choices[0].finish_reason == "timeout"


REFUSALS = [
    (Generation(), InvalidRequest, "prompt"),
    (Generation(prompt="a", tokens=(1,)), InvalidRequest, "tokens"),
    (Generation(tokens=()), InvalidRequest, "prompt"),
    (Generation(tokens=(99999,)), InvalidRequest, "prompt"),
    (Generation(tokens=(-1,)), InvalidRequest, "prompt"),
    (Generation(tokens=(20,), n=9), InvalidRequest, "n"),
    (Generation(tokens=(20,), max_tokens=-1), InvalidRequest, "max_tokens"),
    (Generation(tokens=(20,), embed="mean"), InvalidRequest, "max_tokens"),
    (Generation(tokens=(20,), prompt_logprobs=99), InvalidRequest, "prompt_logprobs"),
    (Generation(tokens=(20,), max_tokens=2, min_tokens=3), InvalidRequest, "min_tokens"),
    (Generation(tokens=(20,), max_tokens=10**6), ContextLengthExceeded, "prompt"),
    (Generation(tokens=(20,), stop=("",)), InvalidRequest, "stop"),
    (Generation(tokens=(20,), timeout_s=0), InvalidRequest, "timeout"),
    (Generation(tokens=(20,), sampling=SamplingParams(temperature=-1)), InvalidRequest, "temperature"),
    (Generation(tokens=(20,), sampling=SamplingParams(temperature=float("nan"))), InvalidRequest, "temperature"),
    (Generation(tokens=(20,), sampling=SamplingParams(logit_bias=((99999999, 5),))), InvalidRequest, "logit_bias"),
    (Generation(tokens=(20,), sampling=SamplingParams(suppressed=(-5,))), InvalidRequest, "suppressed"),
    (Generation(tokens=(20,), stop_token_ids=(99999,)), InvalidRequest, "stop_token_ids"),
    (Generation(prompt="half a pair \ud800"), InvalidRequest, "prompt"),
    (Generation(messages=({"role": "user", "content": "half a pair \ud800"},)), InvalidRequest, "messages"),
]


async def test_refusals_name_the_parameter(folder_of, serving) -> None:
    async with serving(Runtime(model=str(folder_of("llama")))) as (service, _):
        for generation, error, param in REFUSALS:
            with pytest.raises(TroupeError) as caught:
                await service.complete(generation)
            assert (type(caught.value), caught.value.param) == (error, param), generation
            assert len(await tokens_of(service, [20, 30], 3)) == 3


async def test_stop_token_and_min_tokens(folder_of, alone, serving) -> None:
    expected = alone("llama", [20, 30, 40], 40)
    stop = expected[6]
    async with serving(Runtime(model=str(folder_of("llama")))) as (service, _):

        async def ask(**options: int) -> tuple[str, object, int]:
            completion = await service.complete(
                Generation(tokens=(20, 30, 40), sampling=GREEDY, max_tokens=40, stop_token_ids=(stop,), **options)
            )
            choice = completion.choices[0]
            return choice.finish_reason, choice.stop, len(choice.tokens)

        reason, matched, count = await ask()
        assert (reason, matched, count) == ("stop", stop, expected.index(stop) + 1)
        _, _, longer = await ask(min_tokens=20)
        assert longer >= 20


async def test_stop_string_ends_generation_and_is_not_emitted(folder_of, serving) -> None:
    async with serving(Runtime(model=str(folder_of("llama")))) as (service, _):
        plain = await service.complete(Generation(tokens=(20, 30), sampling=GREEDY, max_tokens=40, ignore_eos=True))
        stop = plain.text[10:14]
        cut = await service.complete(
            Generation(tokens=(20, 30), sampling=GREEDY, max_tokens=40, ignore_eos=True, stop=(stop,))
        )
    assert cut.text == plain.text[: plain.text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < 40


async def test_logprobs_only_where_asked(folder_of, serving) -> None:
    async with serving(Runtime(model=str(folder_of("llama")))) as (service, _):
        asked = Generation(tokens=(20, 30), sampling=SamplingParams(temperature=0, top_logprobs=3), max_tokens=5)
        plain = Generation(tokens=(20, 30), sampling=GREEDY, max_tokens=5)
        one, two = await asyncio.gather(service.complete(asked), service.complete(plain))
    entries = one.choices[0].logprobs
    assert entries is not None
    assert len(entries) == 5
    assert all(len(entry.top) == 3 and entry.chosen == entry.top[0] for entry in entries)
    assert all(entry.chosen.logprob <= 0 for entry in entries)
    assert two.choices[0].logprobs is None
    assert one.choices[0].tokens == two.choices[0].tokens


async def test_queue_is_bounded(folder_of, serving) -> None:
    async with serving(Runtime(model=str(folder_of("llama")), max_rows=1, max_queue=2)) as (service, _):
        generation = Generation(tokens=(20, 30), sampling=GREEDY, max_tokens=200, ignore_eos=True)
        results = await asyncio.gather(*(service.complete(generation) for _ in range(8)), return_exceptions=True)
    refused = [result for result in results if isinstance(result, Overloaded)]
    assert 4 <= len(refused) <= 6
    assert all(error.retry_after_s > 0 for error in refused)
    assert all(not isinstance(result, BaseException) for result in results if result not in refused)


async def test_several_runtimes_in_one_process(folder_of, alone, serving) -> None:
    async with (
        serving(Runtime(model=str(folder_of("llama")))) as (one, _),
        serving(Runtime(model=str(folder_of("qwen3")))) as (two, _),
    ):
        found = await asyncio.gather(
            *(tokens_of(service, [20, 30, 40], 20) for service in (one, two) for _ in range(4))
        )
    assert found == [alone("llama", [20, 30, 40], 20)] * 4 + [alone("qwen3", [20, 30, 40], 20)] * 4


async def test_no_thread_and_no_task_is_left(folder_of, serving) -> None:
    before = {thread.name for thread in threading.enumerate()}
    async with serving(Runtime(model=str(folder_of("llama")))) as (service, _):
        await tokens_of(service, [20, 30], 5)
    left = {thread.name for thread in threading.enumerate()} - before
    assert not {name for name in left if name.startswith(("mlx", "text"))}
    assert len(asyncio.all_tasks()) == 1


async def test_closing_ends_running_requests_with_an_error(folder_of, serving) -> None:
    async with serving(Runtime(model=str(folder_of("llama")))) as (service, runtime):
        task = asyncio.create_task(service.complete(Generation(tokens=(20, 30), sampling=GREEDY, ignore_eos=True)))
        await until(lambda: runtime.statistics().running)
    with pytest.raises(TroupeError) as caught:
        await task
    assert caught.value.code == "shutting_down"


async def test_drain_lets_running_requests_end(folder_of, serving) -> None:
    async with serving(Runtime(model=str(folder_of("llama")))) as (service, runtime):
        task = asyncio.create_task(tokens_of(service, [20, 30], 100))
        await until(lambda: runtime.statistics().running)
        await service.drain(30)
        assert len(await task) == 100
        with pytest.raises(NotReady):
            await tokens_of(service, [20], 1)
        assert service.readiness().reason == "draining"


async def test_a_dead_engine_answers_everyone(folder_of, monkeypatch, serving) -> None:
    async with serving(Runtime(model=str(folder_of("llama")), restart_limit=0)) as (service, runtime):
        generation = Generation(tokens=(20, 30), sampling=GREEDY, ignore_eos=True)
        tasks = [asyncio.create_task(service.complete(generation)) for _ in range(3)]
        await until(lambda: not (runtime.statistics().running < 3))

        def broken(*_: object) -> None:
            raise MemoryError("the device is gone")

        monkeypatch.setattr(runtime._supervisor.loaded.engine, "run", broken)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, TroupeError) for result in results)
        await until(lambda: service.readiness().reason == "failed")
        with pytest.raises(NotReady):
            await tokens_of(service, [20], 1)


async def test_metrics_tell_what_happened(folder_of, serving) -> None:
    async with serving(Runtime(model=str(folder_of("llama")), served_name="mine")) as (service, _):
        await tokens_of(service, [20, 30], 5)
        text = (await service.metrics()).decode()
    assert 'mlx_troupe_request_success_total{finished_reason="length",model_name="mine"} 1.0' in text
    assert 'mlx_troupe_generation_tokens_total{model_name="mine"} 5.0' in text
    assert 'mlx_troupe_inter_token_latency_seconds_count{model_name="mine"} 4.0' in text
    assert 'mlx_troupe_actor_messages_total{actor="decode",model_name=' in text


async def test_status_tells_queues_and_memory(folder_of, serving) -> None:
    runtime = Runtime(model=str(folder_of("llama")), served_name="mine", memory_limit_bytes=1 << 33)
    before = await runtime.status()
    assert (before.model, before.memory, before.readiness.reason) == ("", None, "loading")
    async with serving(runtime) as (service, _):
        await tokens_of(service, [20, 30], 5)
        status = await service.status()
    assert status.model == "mine"
    assert status.statistics.completion_tokens == 5
    memory = status.memory
    assert memory is not None
    assert memory.guarded
    assert 0 < memory.admission_bytes <= memory.dynamic_bytes <= memory.abort_bytes <= 1 << 33
    assert memory.admission_bytes < memory.preempt_bytes < memory.abort_bytes
    assert memory.base_bytes > 0
    assert memory.remedy


async def test_failed_event_reaches_a_stream(folder_of, monkeypatch, serving) -> None:
    """A faulty row fails alone: its text handling raises, its neighbour goes on."""
    async with serving(Runtime(model=str(folder_of("llama")))) as (service, runtime):
        neighbour = asyncio.create_task(tokens_of(service, [20, 30], 60))
        async with service.stream(Generation(tokens=(20, 30), sampling=GREEDY, ignore_eos=True)) as stream:
            await stream.take()
            row = next(request for request in runtime._live.values() if request.request_id == stream.request_id)
            monkeypatch.setattr(row, "text", None)
            events = [event async for event in stream]
        assert isinstance(events[-1], Failed)
        assert len(await neighbour) == 60
