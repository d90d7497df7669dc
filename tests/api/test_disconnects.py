"""A client that leaves cancels its request, in every state, over real sockets."""

import asyncio

import pytest

from mlx_troupe.runtime.events import PrefillProgress, TextDelta

from .fake_service import FakeService
from .serving import CHAT, COMPLETIONS, HI, Client, serving


def paused(*before):
    gate = asyncio.Event()
    return lambda generation: [*before, gate]


STAGES = {
    "queued": [],
    "prefill": [PrefillProgress(512, 2048)],
    "decode": [PrefillProgress(2048, 2048), TextDelta("Hel", (1,))],
}


async def gone(client: Client, requests: int = 1) -> None:
    service = client.service
    await service.until(lambda: len(service.cancelled) == requests and not service.active)


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("stage", STAGES)
async def test_streaming(stage, how):
    async with serving(FakeService(paused(*STAGES[stage]))) as client:
        async with client.raw(CHAT, HI | {"stream": True}) as request:
            await client.service.until(lambda: client.service.active)
            if stage == "decode":
                await request.until(b"Hel")
            elif stage == "prefill":
                source = next(iter(client.service.active.values()))
                await source.at_gate.wait()
            if how == "abort":
                request.abort()
        await gone(client)
        assert await client.metric(f'mlx_troupe_http_disconnects_total{{stage="{stage}"}}') == 1
        assert await client.metric('mlx_troupe_http_requests_total{route="/v1/chat/completions",status="499"}') == 1
        assert await client.metric("mlx_troupe_http_requests_in_progress") == 1  # the one that asks


@pytest.mark.parametrize("stage", STAGES)
async def test_not_streaming(stage):
    async with serving(FakeService(paused(*STAGES[stage]))) as client:
        async with client.raw(CHAT, HI):
            await client.service.until(lambda: client.service.active)
        await gone(client)
        assert await client.metric('mlx_troupe_http_disconnects_total{stage="answer"}') == 1


async def test_after_keepalives():
    async with serving(FakeService(paused()), keepalive_interval_s=0.01) as client:
        async with client.raw(CHAT, HI | {"stream": True}) as request:
            await request.until(b": keepalive")
        await gone(client)


@pytest.mark.parametrize("stream", [False, True])
async def test_all_prompts_of_a_list(stream):
    async with serving(FakeService(paused(TextDelta("Hel", (1,))))) as client:
        async with client.raw(COMPLETIONS, {"prompt": ["a", "b", "c"], "stream": stream}):
            await client.service.until(lambda: len(client.service.active) == 3)
        await gone(client, 3)


async def test_half_a_body():
    async with serving() as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        writer.write_eof()
        await reader.read()
        writer.close()
        await writer.wait_closed()
        assert await client.metric('mlx_troupe_http_requests_total{route="/v1/chat/completions",status="499"}') == 1
        assert client.service.submitted == []


async def test_one_failing_prompt_cancels_the_others():
    def script(generation):
        if generation.prompt == "bad":
            return [RuntimeError("a bug")]
        return [TextDelta("Hel", (1,)), asyncio.Event()]

    for stream in (False, True):
        async with serving(FakeService(script)) as client:
            answer = await client.complete(prompt=["a", "bad", "c"], stream=stream)
            assert b"internal_error" in answer.body
            await gone(client, 3)


async def test_refusing_one_prompt_refuses_all():
    async with serving(FakeService(paused())) as client:
        client.service.most = 1
        for stream in (False, True):
            answer = await client.complete(prompt=["a", "b"], stream=stream)
            assert answer.status == 429
            assert answer.headers["Retry-After"] == "1"
        await gone(client, 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", ["id", "header"])
async def test_cancel_by_id(stream, by):
    async with serving(FakeService(paused(TextDelta("Hel", (1,))))) as client:
        task = asyncio.create_task(
            client.post(COMPLETIONS, {"prompt": ["a", "b"], "stream": stream}, headers={"X-Request-Id": "mine:1"})
        )
        await client.service.until(lambda: len(client.service.active) == 2)
        name = next(iter(client.service.active)).removesuffix("-0") if by == "id" else "mine:1"
        assert (await client.request("DELETE", f"/v1/requests/{name}")).json["cancelled"] is True
        answer = await task
        assert answer.status == (200 if stream else 499)
        error = answer.chunks[-1]["error"] if stream else answer.error
        assert error["code"] == "cancelled"
        missing = await client.request("DELETE", "/v1/requests/unknown")
        assert missing.status == 404
        assert missing.error["code"] == "request_not_found"
