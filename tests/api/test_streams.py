"""Event streams byte for byte, and how they end."""

import asyncio

import pytest

from mlx_troupe.api.sse import json_text
from mlx_troupe.runtime.events import Failed, Finished, PrefillProgress, TextDelta, Usage

from .fake_service import FakeService, hello
from .serving import CHAT, COMPLETIONS, HI, Client, serving

END = Finished("stop", Usage(2, 0, 1))


async def test_chat_chunks(client: Client):
    answer = await client.chat(stream=True)
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["Cache-Control"] == "no-cache"
    assert answer.headers["X-Accel-Buffering"] == "no"
    assert answer.events[-1] == "[DONE]"
    assert answer.events.count("[DONE]") == 1
    first, *texts, last = answer.chunks
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert texts[0]["choices"] == [{"index": 0, "delta": {"content": "Hello"}, "logprobs": None, "finish_reason": None}]
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert all("usage" not in chunk for chunk in answer.chunks)
    assert {chunk["object"] for chunk in answer.chunks} == {"chat.completion.chunk"}


async def test_usage_is_null_until_the_last_chunk(client: Client):
    answer = await client.chat(stream=True, stream_options={"include_usage": True}, n=2, logprobs=True)
    *chunks, last = answer.chunks
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 8,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert answer.events[-1] == "[DONE]"


async def test_completion_chunks(client: Client):
    answer = await client.complete(stream=True)
    assert answer.events[-1] == "[DONE]"
    *texts, last = answer.chunks
    assert [chunk["choices"][0]["text"] for chunk in texts] == ["Hello", ",", " wörld", "!"]
    assert last["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}]
    assert {chunk["object"] for chunk in answer.chunks} == {"text_completion"}


async def test_events_that_wait_together_are_one_write():
    def script(generation):
        return [[*(TextDelta(letter, (1,)) for letter in "abc"), END]]

    async with serving(FakeService(script)) as client, client.raw(CHAT, HI | {"stream": True}) as request:
        await request.until(b"\r\n\r\n")
        size = int((await request.until(b"\r\n")).strip(), 16)
        chunk = await request.reader.readexactly(size)
    assert chunk.count(b"data: ") == 6  # role, three letters, end, [DONE]
    assert chunk.endswith(b"data: [DONE]\n\n")


async def test_held_back_text_is_not_sent():
    def script(generation):
        return [TextDelta("", (1,)), TextDelta("ab", (2,)), END]

    async with serving(FakeService(script)) as client:
        answer = await client.chat(stream=True)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in answer.chunks] == ["", "ab", None]


@pytest.mark.parametrize("text", ['"\\\n\r\x00\x7f', "\u2028\u2029\x85x", "日本語 🎭", "a\u2027\u2030"])
async def test_no_text_breaks_a_line(text):
    assert not set("\n\r\x85\u2028\u2029") & set(json_text(text).decode())

    def script(generation):
        return [TextDelta(text, (1,)), END]

    async with serving(FakeService(script)) as client:
        answer = await client.chat(stream=True)
    assert answer.chunks[1]["choices"][0]["delta"]["content"] == text


async def test_http_1_0_gets_a_plain_body(client: Client):
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    body = b'{"prompt":"hi","stream":true}'
    writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % 29)
    writer.write(body)
    head, _, data = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    assert b"chunked" not in head
    assert data.startswith(b"data: {")
    assert data.endswith(b"data: [DONE]\n\n")


async def test_connection_is_kept_for_the_next_request(client: Client):
    async with client.raw(COMPLETIONS, {"prompt": "hi", "stream": True}) as request:
        await request.until(b"[DONE]\n\n\r\n0\r\n\r\n")
        request.writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in await request.until(b"\r\n")


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (Failed("engine_failed", "nan"), "engine_failed"),
        (Finished("timeout", Usage()), "timeout"),
        (Finished("cancelled", Usage()), "cancelled"),
        (RuntimeError("a bug"), "internal_error"),
    ],
)
async def test_nothing_follows_an_error(ending, code):
    def script(generation):
        return [TextDelta("Hel", (1,)), ending, TextDelta("lo", (2,)), END]

    async with serving(FakeService(script)) as client, client.raw(CHAT, HI | {"stream": True}) as request:
        answer = await request.reader.read()  # to the connection's end
        assert await client.metric(f'mlx_troupe_http_errors_total{{code="{code}"}}') == 1
    assert b"[DONE]" not in answer
    assert b'"lo"' not in answer
    assert answer.endswith(b"0\r\n\r\n")
    last = answer.split(b"\n\n")[-2].split(b"data: ")[1]
    assert last.startswith(b'{"error":{"message":')
    assert f'"code":"{code}"'.encode() in last


@pytest.mark.parametrize(
    ("ending", "status", "code"),
    [
        (Failed("engine_failed", "nan"), 500, "engine_failed"),
        (Failed("queue_timeout", "waited too long", None, 3.2), 503, "queue_timeout"),
        (Failed("overloaded", "no room", None, 3.2), 429, "overloaded"),
        (Failed("invalid_value", "bad", "stop"), 400, "invalid_value"),
        (Finished("timeout", Usage()), 504, "timeout"),
        (Finished("cancelled", Usage()), 499, "cancelled"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_any_text_has_its_status(ending, status, code, stream):
    def script(generation):
        return [PrefillProgress(1, 2), ending]

    async with serving(FakeService(script)) as client:
        answer = await client.chat(stream=stream)
    if not stream and isinstance(ending, Failed):
        return  # what `complete` raises is the runtime's own choice
    assert answer.status == status
    assert answer.error["code"] == code
    assert answer.headers.get("Retry-After") == ("4" if "3.2" in str(ending) else None)
    if status in (499, 504):
        assert answer.headers["X-Should-Retry"] == "false"


async def test_a_source_that_falls_silent_is_an_error():
    async with serving(FakeService(lambda generation: [TextDelta("a", (1,))])) as client:
        answer = await client.chat(stream=True)
    assert answer.events[-1] != "[DONE]"
    assert answer.chunks[-1]["error"]["code"] == "internal_error"


async def test_keepalive_says_how_far_the_prefill_is():
    gate = asyncio.Event()

    def script(generation):
        return [PrefillProgress(512, 2048), gate, *hello(generation)]

    async with (
        serving(FakeService(script), keepalive_interval_s=0.02) as client,
        client.raw(CHAT, HI | {"stream": True}) as request,
    ):
        head = await request.until(b": keepalive 512/2048\n\n")
        assert head.startswith(b"HTTP/1.1 200")
        await request.until(b": keepalive 512/2048\n\n")
        gate.set()
        rest = await request.until(b"[DONE]\n\n")
    assert b'"content":"Hello"' in rest


async def test_keepalive_in_the_queue_and_between_tokens():
    queue, pause = asyncio.Event(), asyncio.Event()

    def script(generation):
        return [queue, TextDelta("a", (1,)), pause, END]

    async with (
        serving(FakeService(script), keepalive_interval_s=0.02) as client,
        client.raw(CHAT, HI | {"stream": True}) as request,
    ):
        await request.until(b": keepalive\n\n")
        queue.set()
        await request.until(b'"content":"a"')
        await request.until(b": keepalive\n\n")
        pause.set()
        await request.until(b"[DONE]\n\n")


async def test_busy_streams_get_no_keepalive(client: Client):
    assert (await client.chat(stream=True)).comments == []


async def test_progress_chunks_on_request():
    def script(generation):
        return [PrefillProgress(512, 2048), PrefillProgress(2048, 2048), *hello(generation)]

    async with serving(FakeService(script)) as client:
        plain = await client.chat(stream=True)
        asked = await client.chat(stream=True, return_progress=True, stream_options={"include_usage": True})
    assert not any("prompt_progress" in chunk for chunk in plain.chunks)
    progress = [chunk["prompt_progress"] for chunk in asked.chunks if "prompt_progress" in chunk]
    assert progress == [{"total": 2048, "processed": 512}, {"total": 2048, "processed": 2048}]
    assert all(chunk["choices"] == [] for chunk in asked.chunks if "prompt_progress" in chunk)
