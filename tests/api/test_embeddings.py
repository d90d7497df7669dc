"""`/v1/embeddings`: with OpenAI's client and a real model, and what is refused."""

import asyncio
import base64
import struct

import numpy as np
import openai
import pytest

from mlx_troupe.runtime import Runtime
from mlx_troupe.runtime.events import Finished, Usage
from mlx_troupe.runtime.generation import EmbeddingQuery
from tests.models.tiny import build_tiny

from .fake_service import FakeService
from .serving import Client, serving
from .tiny_server import post, real_openai, real_server

PATH = "/v1/embeddings"
TEXTS = ["one text", "another", "ein dritter, längerer Text " * 40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(folder):
    """Vectors by mlx_lm alone."""
    import mlx.core as mx
    from mlx_lm import load

    model, tokenizer = load(str(folder))

    def vector(given, pooling):
        ids = tokenizer.encode(given) if isinstance(given, str) else given
        hidden = np.array(model.model(mx.array([ids]))[0].astype(mx.float32))
        found = hidden[-1] if pooling == "last" else hidden.mean(axis=0)
        return found / np.linalg.norm(found), len(ids)

    return vector


async def test_openais_client_gets_what_mlx_lm_computes(folder, alone):
    wanted = [alone(text, "mean") for text in TEXTS]
    async with real_openai(folder) as client:
        answer = await client.embeddings.create(model="tiny", input=TEXTS)  # asks for base64, unpacks by itself
        plain = await client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        one = await client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=5)
        last = await client.embeddings.create(model="tiny", input=TEXTS[0], extra_body={"pooling": "last"})
        ids = await client.embeddings.create(model="tiny", input=[[5, 6, 7], [8]])
        flat = await client.embeddings.create(model="tiny", input=[5, 6, 7])
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    for found, (vector, _) in zip(answer.data, wanted, strict=True):
        assert np.array(found.embedding) == pytest.approx(vector, abs=1e-4)
        assert np.linalg.norm(found.embedding) == pytest.approx(1, abs=1e-5)
    for one_way, other in zip(plain.data, answer.data, strict=True):
        assert one_way.embedding == pytest.approx(other.embedding, abs=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(tokens for _, tokens in wanted)
    short = wanted[0][0][:5]
    assert one.data[0].embedding == pytest.approx(list(short / np.linalg.norm(short)), abs=1e-4)
    assert last.data[0].embedding == pytest.approx(list(alone(TEXTS[0], "last")[0]), abs=1e-4)
    assert ids.data[0].embedding == pytest.approx(list(alone([5, 6, 7], "mean")[0]), abs=1e-4)
    assert flat.data[0].embedding == ids.data[0].embedding
    assert len(ids.data) == 2


async def test_many_inputs_and_a_chat_share_the_server(folder):
    """120 inputs at once: more than there are rows; the chat among them gives what it gives alone."""
    chat = {"prompt": "hi", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    async with real_server(folder) as url:
        _, alone_answer = await post(url, "/v1/completions", chat)
        texts = [f"text number {number}" for number in range(120)]
        embedded, answer = await asyncio.gather(
            post(url, PATH, {"input": texts}), post(url, "/v1/completions", chat | {"cache": False})
        )
        again = [await post(url, PATH, {"input": text}) for text in texts[:3]]
    assert answer[1]["choices"] == alone_answer["choices"]
    status, found = embedded
    assert status == 200
    assert len(found["data"]) == 120
    for place, (_, single) in enumerate(again):
        assert found["data"][place]["embedding"] == pytest.approx(single["data"][0]["embedding"], abs=1e-4)


REFUSED = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": ""}, "input"),
    ({"input": ["a", ""]}, "input"),
    ({"input": [[1, 2], []]}, "input"),
    ({"input": [1, "a"]}, "input"),
    ({"input": [100000]}, "input"),
    ({"input": "word " * 20000}, "input"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": 100000}, "dimensions"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "pooling": "cls"}, "pooling"),
    ({"input": {"a": 1}}, "input"),
]


async def test_what_cannot_be_had_is_400_and_named(folder):
    async with real_server(folder) as url:
        for fields, param in REFUSED:
            status, answer = await post(url, PATH, fields)
            assert (status, answer["error"]["param"]) == (400, param), str(fields)[:100]


async def test_base64_is_little_endian_float32(client: Client):
    numbers = (await client.post(PATH, {"input": "ab"})).json["data"][0]["embedding"]
    text = (await client.post(PATH, {"input": "ab", "encoding_format": "base64"})).json["data"][0]["embedding"]
    assert struct.unpack("<3f", base64.b64decode(text)) == pytest.approx(tuple(numbers))


async def test_another_model_is_404(client: Client):
    assert (await client.post(PATH, {"input": "a", "model": "other"})).status == 404


async def test_it_can_be_cancelled_by_its_request_id():
    gate = asyncio.Event()
    async with serving(FakeService(lambda _: [gate, Finished("length", Usage())])) as client:
        asking = asyncio.ensure_future(client.post(PATH, {"input": "a"}, headers={"X-Request-Id": "mine"}))
        await client.service.until(lambda: client.service.active)
        assert (await client.request("DELETE", "/v1/requests/mine")).status == 200
        await asking
        assert not client.service.active


async def test_a_cancelled_query_ends_all_its_inputs(folder):
    async with Runtime(model=str(folder)) as runtime:
        query = EmbeddingQuery(inputs=("long text " * 100,) * 40, request_id="q")
        asking = asyncio.ensure_future(runtime.embed(query))
        for _ in range(2000):
            if runtime.statistics().prefilling:
                break
            await asyncio.sleep(0.001)
        for place in range(40):
            runtime.cancel(f"q-{place}")
        with pytest.raises(Exception, match="cancelled"):
            await asking
        late = EmbeddingQuery(inputs=("long text " * 100,) * 40, timeout_s=0.01)
        with pytest.raises(Exception, match="time was over"):
            await runtime.embed(late)
        await runtime.embed(EmbeddingQuery(inputs=("a",)))
        assert runtime.statistics().prefilling == 0


async def test_the_folder_says_how_its_model_pools(tmp_path):
    folder = build_tiny("llama", tmp_path / "m")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": false}')
    async with Runtime(model=str(folder)) as told, Runtime(model=str(folder), embedding_pooling="mean") as set_so:
        asked = (await told.embed(EmbeddingQuery(inputs=("a b c",), pooling="last"))).vectors
        assert (await told.embed(EmbeddingQuery(inputs=("a b c",)))).vectors == asked
        assert (await set_so.embed(EmbeddingQuery(inputs=("a b c",)))).vectors != asked


async def test_errors_are_openais(folder):
    async with real_openai(folder) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.embeddings.create(model="tiny", input="")
        assert caught.value.param == "input"
