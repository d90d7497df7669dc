"""Both ends on one loop: what ends in the middle, comes too late, or does not listen."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest

from mlx_troupe.runtime import (
    Failed,
    Finished,
    Generation,
    InvalidRequest,
    NotReady,
    Runtime,
    SamplingParams,
    TextDelta,
    TroupeError,
)
from mlx_troupe.runtime.errors import ActorDied
from mlx_troupe.runtime.remote import RemoteRuntime
from mlx_troupe.runtime.remote.engine import EngineProcess
from mlx_troupe.runtime.remote.link import frame_of
from mlx_troupe.runtime.remote.to_engine import Close, Hello, Open, Stop, wire_version
from tests.models.tiny import build_tiny

from .hosting import HostedEngine, served

if TYPE_CHECKING:
    from collections.abc import Callable

GREEDY = SamplingParams(temperature=0)
ENDLESS = Generation(tokens=(20, 30), sampling=GREEDY, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(build_tiny("llama", tmp_path_factory.mktemp("llama")))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(250):
        while not condition():  # noqa: ASYNC110 - the engine's own pace
            await asyncio.sleep(0.005)


def host_of(service: RemoteRuntime):
    host = service._engine.process._host
    assert host is not None
    return host


def idle(service: RemoteRuntime, runtime: Runtime) -> bool:
    now = runtime.statistics()
    return not (now.running or now.waiting or now.prefilling or host_of(service)._open or host_of(service)._calls)


async def test_a_dead_engine_process_answers_everybody_and_a_new_one_serves(model) -> None:
    """Streams and whole answers, running, prefilling and queued; and questions."""
    runtimes: list[Runtime] = []

    def start() -> HostedEngine:
        runtimes.append(Runtime(model=model, max_rows=3, prefill_chunk_tokens=16))
        return HostedEngine(runtimes[-1])

    async with RemoteRuntime(Runtime(model=model, max_rows=3).config, start=start) as service:
        alone = await service.complete(Generation(tokens=(20, 30), sampling=GREEDY, max_tokens=20, ignore_eos=True))
        async with service.stream(ENDLESS) as running, service.stream(ENDLESS) as untouched:
            await running.take()
            work = [asyncio.create_task(service.complete(ENDLESS)) for _ in range(3)]
            long = Generation(tokens=tuple(range(20, 420)), sampling=GREEDY, n=2, ignore_eos=True)
            work += [asyncio.create_task(service.complete(long)), asyncio.create_task(service.tokenize("a " * 50_000))]
            await until(lambda: runtimes[0].statistics().waiting)
            service._engine.kill()
            results = await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 250)
            assert [result.code for result in results] == ["actor_died"] * 5
            for source in (running, untouched):
                events = [event async for event in source]
                assert isinstance(events[-1], Failed)
                assert (events[-1].code, sum(isinstance(event, Failed) for event in events)) == ("actor_died", 1)
        assert not service.readiness().ready
        assert service.readiness().reason == "restarting"
        with pytest.raises(NotReady):
            await service.complete(ENDLESS)
        assert b"mlx_troupe_engine_process_up 0" in await service.metrics()
        assert (await service.status()).readiness.reason == "restarting"
        await until(lambda: service.readiness().ready)
        again = await service.complete(Generation(tokens=(20, 30), sampling=GREEDY, max_tokens=20, ignore_eos=True))
        assert again.choices == alone.choices or again.text == alone.text
        assert (await service.status()).statistics.restarts == 1
        assert b"mlx_troupe_engine_process_restarts_total 1" in await service.metrics()


async def test_restarts_are_limited(model) -> None:
    async with served("remote", Runtime(model=model, restart_limit=0)) as (service, _):
        service._engine.kill()
        await until(lambda: service.readiness().reason == "failed")
        with pytest.raises(NotReady):
            await service.complete(ENDLESS)
        with pytest.raises(NotReady):
            _ = service.model


async def test_an_engine_process_that_stands_still_is_killed(model, monkeypatch) -> None:
    monkeypatch.setattr("mlx_troupe.runtime.remote.front.WATCH_S", 0.02)
    runtime = Runtime(model=model, step_timeout_s=1.0, hang_timeout_s=3.0, restart_limit=0)
    async with served("remote", runtime) as (service, _):
        monkeypatch.setattr(host_of(service), "pulse", lambda **_: None)
        service._silent_s = 1.1
        assert service.readiness().reason == "stalled"
        service._silent_s = 2.9
        monkeypatch.setattr("mlx_troupe.runtime.remote.front.WATCH_S", 0.2)
        await until(lambda: service.readiness().reason == "failed")


async def test_an_engine_that_fails_inside_turns_readiness_red_with_the_failure(model, monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("the device is gone")

    async with (
        served("remote", Runtime(model=model, restart_limit=0)) as (service, runtime),
        service.stream(ENDLESS) as source,
    ):
        await source.take()
        monkeypatch.setattr(runtime._supervisor.loaded.engine, "run", broken)
        events = [event async for event in source]
        assert isinstance(events[-1], Failed)
        assert not service.readiness().ready


async def test_streams_that_come_and_go_leave_nothing(model) -> None:
    async with served("remote", Runtime(model=model, max_rows=8)) as (service, runtime):

        async def visit(turns: int) -> None:
            for _ in range(turns % 13):
                await asyncio.sleep(0)
            async with service.stream(ENDLESS) as source:
                for _ in range(turns % 3):
                    await source.take()

        tasks = [asyncio.create_task(visit(turns)) for turns in range(150)]
        for turn, task in enumerate(tasks):
            if turn % 2:
                for _ in range(turn % 5):
                    await asyncio.sleep(0)
                task.cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 250)
        await until(lambda: idle(service, runtime))
        assert service._session._streams == service._session._calls == {}
        assert len((await service.complete(Generation(tokens=(20,), max_tokens=3, ignore_eos=True))).text) > 0


@pytest.mark.parametrize("kind", ["local", "remote"])
async def test_a_caller_that_leaves_at_any_turn_leaves_no_row(kind, model) -> None:
    """Not even one that is being queued just then."""
    async with served(kind, Runtime(model=model)) as (service, runtime):
        for turns in range(40):
            task = asyncio.create_task(service.complete(ENDLESS))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: not (runtime.statistics().running or runtime.statistics().waiting))
        await asyncio.sleep(0.05)
        assert runtime.statistics().running == runtime.statistics().waiting == 0
        if kind == "remote":
            await until(lambda: idle(service, runtime))


async def test_a_front_that_reads_nothing_holds_nobody_up_and_loses_nothing(model) -> None:
    count = 500
    runtime = Runtime(model=model)
    async with served("remote", runtime) as (service, _):
        # Small buffers, so that little text fills them.
        for one in (service._session.link, service._engine.process._link):
            one._transport.set_write_buffer_limits(high=2048)
            one._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        generation = Generation(tokens=(20, 30), sampling=GREEDY, max_tokens=count, ignore_eos=True)
        async with service.stream(generation) as source:
            await source.take()
            service._session.link._transport.pause_reading()
            (outlet, _), *_ = host_of(service)._open.values()
            most = 0
            while not outlet.over:
                most = max(most, len(outlet._events))
                await asyncio.sleep(0.001)
            assert 10 < most <= runtime.config.event_buffer + 1
            service._session.link._transport.resume_reading()
            events = [event async for event in source]
            tokens = [token for event in events if isinstance(event, TextDelta) for token in event.tokens]
            assert isinstance(events[-1], Finished)
        whole = await service.complete(generation)
        assert list(whole.choices[0].tokens)[-len(tokens) :] == tokens
        assert len(tokens) > count - 70


async def test_what_cannot_be_sent_is_refused_and_harms_nobody(model) -> None:
    async with served("remote", Runtime(model=model)) as (service, _):
        deep: list[object] = []
        for _ in range(100_000):
            deep = [deep]
        bad = [
            Generation(messages=({"role": "user", "content": "x", "n": 1 << 70},)),
            Generation(messages=({"role": "user", "content": object()},)),
            Generation(messages=({"role": "user", "content": deep},)),
            Generation(prompt="a", tools=({"name": "\udfff"},)),
        ]
        async with service.stream(ENDLESS) as source:
            for generation in bad:
                with pytest.raises(InvalidRequest):
                    await service.complete(generation)
            assert await source.take()


async def test_an_answer_that_cannot_be_sent_is_an_error_of_its_call_alone(model, monkeypatch) -> None:
    async with served("remote", Runtime(model=model)) as (service, runtime), service.stream(ENDLESS) as source:

        async def broken(*_: object, **__: object) -> str:
            return "half a pair \ud800"

        async def refused(*_: object) -> int:
            raise InvalidRequest("what you sent, \ud800, is no text")

        monkeypatch.setattr(runtime, "detokenize", broken)

        async def long(*_: object, **__: object) -> list[int]:
            return list(range(100_000))

        monkeypatch.setattr(runtime, "tokenize", long)
        monkeypatch.setattr(runtime, "count_tokens", refused)
        monkeypatch.setattr(host_of(service)._link, "_limit_bytes", 1 << 16)
        for call in (service.detokenize([20]), service.tokenize("a")):
            with pytest.raises(TroupeError) as caught:
                await call
            assert caught.value.code == "internal_error"
        with pytest.raises(InvalidRequest, match=r"what you sent, \?, is no text"):
            await service.count_tokens(ENDLESS)
        service.cancel("\ud800")
        assert await source.take()


async def test_a_fault_while_events_are_gathered_ends_the_connection_not_the_streams_alone(model, monkeypatch) -> None:
    """Its events are lost, so nobody may wait for them."""
    async with served("remote", Runtime(model=model, restart_limit=0)) as (service, _):
        async with service.stream(ENDLESS) as source:
            await source.take()

            def broken() -> None:
                raise ArithmeticError("no")

            monkeypatch.setattr(host_of(service)._outbox, "gather", broken)
            monkeypatch.setattr(service._engine.process._host, "gather", broken)
            events = [event async for event in source]
        assert isinstance(events[-1], Failed)
        assert events[-1].code == "actor_died"


async def test_a_path_that_is_no_text_is_refused_with_advice(model) -> None:
    with pytest.raises(TroupeError, match="--api-process off"):
        await served("remote", Runtime(model=model + "\udcff")).__aenter__()


async def test_a_second_greeting_or_number_ends_the_connection(model) -> None:
    for message in (Hello(wire_version(), Runtime(model=model).config), Open(7, ENDLESS)):
        async with served("remote", Runtime(model=model, restart_limit=0)) as (service, _):
            service._session.link.send(Open(7, ENDLESS))
            service._session.link.send(message)
            await until(lambda: service.readiness().reason == "failed")


async def test_closing_what_is_not_open_does_nothing(model) -> None:
    async with served("remote", Runtime(model=model)) as (service, _):
        for number in (1, 99, -1, 2**40):
            service._session.link.send(Close(number))
        assert await service.tokenize("hi")


async def test_another_version_is_refused_with_advice(model, monkeypatch) -> None:
    monkeypatch.setattr("mlx_troupe.runtime.remote.front.wire_version", lambda: "0.0.1")
    with pytest.raises(TroupeError, match=r"start it again"):
        await served("remote", Runtime(model=model)).__aenter__()


async def test_a_failed_load_raises_what_it_would_here(tmp_path) -> None:
    raised = []
    for kind in ("local", "remote"):
        with pytest.raises(TroupeError) as caught:
            async with served(kind, Runtime(model=str(tmp_path / "none"))):
                pass
        raised.append((str(caught.value), caught.value.code))
    assert raised[0] == raised[1]


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(frame_of(Stop())), bytes(frame_of(Close(1)))])
async def test_who_does_not_greet_is_not_served(data, model) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    process = EngineProcess(lambda config, progress: pytest.fail("it loaded"))
    task = asyncio.create_task(process.serve(theirs))
    await asyncio.sleep(0)
    await asyncio.get_running_loop().sock_sendall(ours, data)
    ours.close()
    await asyncio.wait_for(task, 250)


async def test_token_texts_come_with_their_events(model) -> None:
    async with served("remote", Runtime(model=model)) as (service, runtime):
        with pytest.raises(LookupError):
            service.token_text(20)
        sampling = SamplingParams(temperature=0, top_logprobs=2)
        completion = await service.complete(
            Generation(tokens=(20, 30), sampling=sampling, max_tokens=6, prompt_logprobs=1, ignore_eos=True)
        )
        choice = completion.choices[0]
        named = {20, 30, *choice.tokens} | {e.token for entry in choice.logprobs for e in entry.top}
        for token in named:
            assert service.token_text(token) == runtime.token_text(token)


async def test_a_stop_tells_everybody(model) -> None:
    async with served("remote", Runtime(model=model)) as (service, _):
        tasks = [asyncio.create_task(service.complete(ENDLESS)) for _ in range(3)]
        async with service.stream(ENDLESS) as source:
            await source.take()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {result.code for result in results} == {"shutting_down"}
    with pytest.raises((NotReady, ActorDied)):
        await service.complete(ENDLESS)
