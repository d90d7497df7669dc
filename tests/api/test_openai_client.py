"""The official `openai` package as a contract."""

import asyncio

import openai
import pytest

from mlx_troupe.runtime.errors import ContextLengthExceeded, EngineFailed, NotReady, Overloaded
from mlx_troupe.runtime.events import Failed, TextDelta

from .fake_service import FakeService
from .serving import Client, serving

MESSAGES = [{"role": "user", "content": "hi"}]


async def test_chat(client: Client):
    async with client.openai() as api:
        answer = await api.chat.completions.create(model="fake/model", messages=MESSAGES)
    assert answer.choices[0].message.content == "Hello, wörld!"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "fake/model"
    assert answer.object == "chat.completion"
    assert answer.system_fingerprint
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == 6
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_chat_stream(client: Client):
    async with client.openai() as api:
        stream = await api.chat.completions.create(
            model="default", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello, wörld!"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1


async def test_chat_choices_and_logprobs(client: Client):
    async with client.openai() as api:
        answer = await api.chat.completions.create(
            model="", messages=MESSAGES, n=3, logprobs=True, top_logprobs=2, max_completion_tokens=3, max_tokens=4
        )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.choices[2].finish_reason == "length"
    content = answer.choices[2].logprobs.content
    assert [entry.token for entry in content] == ["Hello", ",", " wörld"]
    assert bytes(content[2].bytes).decode() == " wörld"
    assert [alternative.token for alternative in content[0].top_logprobs] == ["Hello", ","]
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.completion_tokens == 9


async def test_chat_stream_helper(client: Client):
    async with (
        client.openai() as api,
        api.chat.completions.stream(model="default", messages=MESSAGES, n=2, logprobs=True) as stream,
    ):
        answer = await stream.get_final_completion()
    assert [choice.message.content for choice in answer.choices] == ["Hello, wörld!"] * 2
    assert [entry.token for entry in answer.choices[1].logprobs.content] == ["Hello", ",", " wörld", "!"]


async def test_completion(client: Client):
    async with client.openai() as api:
        answer = await api.completions.create(model="default", prompt="Once", logprobs=2, max_tokens=3, n=2)
    assert [choice.text for choice in answer.choices] == ["Hello, wörld"] * 2
    logprobs = answer.choices[1].logprobs
    assert logprobs.tokens == ["Hello", ",", " wörld"]
    assert logprobs.text_offset == [0, 5, 6]
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
    assert logprobs.top_logprobs[0] == {"Hello": -0.5, ",": -1.5}
    assert answer.object == "text_completion"
    assert answer.usage.prompt_tokens == 4


@pytest.mark.parametrize("prompt", [["a", "bc"], [[1], [2, 3]]])
async def test_completion_prompt_lists(client: Client, prompt):
    async with client.openai() as api:
        answer = await api.completions.create(model="default", prompt=prompt, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 16
    assert [generation.n for generation in client.service.submitted] == [2, 2]
    assert len({generation.request_id for generation in client.service.submitted}) == 2


async def test_completion_token_ids(client: Client):
    async with client.openai() as api:
        await api.completions.create(model="default", prompt=[1, 2, 3])
    assert client.service.submitted[0].tokens == (1, 2, 3)


async def test_completion_stream_of_prompt_list(client: Client):
    async with client.openai() as api:
        stream = await api.completions.create(
            model="default", prompt=["a", "bc"], n=2, stream=True, logprobs=1, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    texts, offsets, ends = [""] * 4, [[], [], [], []], {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.text
        if choice.logprobs:
            offsets[choice.index] += choice.logprobs.text_offset
        if choice.finish_reason:
            assert choice.index not in ends
            ends[choice.index] = choice.finish_reason
    assert texts == ["Hello, wörld!"] * 4
    assert offsets == [[0, 5, 6, 12]] * 4
    assert ends == dict.fromkeys(range(4), "stop")
    assert chunks[-1].usage.prompt_tokens == 3
    assert chunks[-1].usage.completion_tokens == 16


async def test_models(client: Client):
    async with client.openai() as api:
        models = [model async for model in api.models.list()]
        assert [model.id for model in models] == ["fake/model"]
        assert models[0].created == 1_700_000_000
        assert (await api.models.retrieve("fake/model")).id == "fake/model"
        with pytest.raises(openai.NotFoundError) as caught:
            await api.models.retrieve("other")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("refusal", "kind", "code"),
    [
        (ContextLengthExceeded("too long", param="messages"), openai.BadRequestError, "context_length_exceeded"),
        (Overloaded("full"), openai.RateLimitError, "overloaded"),
        (NotReady("draining"), openai.InternalServerError, "not_ready"),
        (EngineFailed("boom"), openai.InternalServerError, "engine_failed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_error_classes(client: Client, refusal, kind, code, stream):
    client.service.refusals.append(refusal)
    async with client.openai() as api:
        with pytest.raises(kind) as caught:
            await api.chat.completions.create(model="default", messages=MESSAGES, stream=stream)
    assert caught.value.code == code
    assert caught.value.request_id
    assert "boom" not in caught.value.message


async def test_unknown_model(client: Client):
    async with client.openai() as api:
        with pytest.raises(openai.NotFoundError) as caught:
            await api.chat.completions.create(model="../../etc/passwd", messages=MESSAGES)
    assert caught.value.code == "model_not_found"


async def test_retries_on_429_after_the_header(client: Client, monkeypatch):
    client.service.refusals += [Overloaded("full", retry_after_s=0.2), Overloaded("full", retry_after_s=2.1)]
    waits = []

    async def no_wait(seconds: float) -> None:
        waits.append(seconds)

    async with client.openai(max_retries=2) as api:
        monkeypatch.setattr("openai._base_client.anyio.sleep", no_wait)
        answer = await api.chat.completions.create(model="default", messages=MESSAGES)
    assert answer.choices[0].message.content == "Hello, wörld!"
    assert waits == [1, 3]  # whole seconds, at least one


async def test_error_inside_a_stream():
    def script(generation):
        return [TextDelta("Hel", (1,)), Failed("engine_failed", "nan in layer 3")]

    async with serving(FakeService(script)) as client, client.openai() as api:
        stream = await api.chat.completions.create(model="default", messages=MESSAGES, stream=True)
        texts = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
        with pytest.raises(openai.APIError) as caught:
            await anext(stream)
    assert texts == ["", "Hel"]
    assert caught.value.code == "engine_failed"
    assert "nan" not in caught.value.message


async def test_closing_the_stream_cancels():
    gate = asyncio.Event()

    def script(generation):
        return [TextDelta("Hel", (1,)), gate]

    async with serving(FakeService(script)) as client, client.openai() as api:
        stream = await api.chat.completions.create(model="default", messages=MESSAGES, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await client.service.until(lambda: client.service.cancelled)
