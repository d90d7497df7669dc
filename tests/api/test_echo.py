"""`echo` of completions, and prompt log-probabilities as evaluation harnesses read them."""

import itertools
import json
import math

import aiohttp
import pytest

from tests.models.tiny import build_tiny

from .serving import Client
from .tiny_server import post, real_openai, real_server

COMPLETIONS = "/v1/completions"
PROMPT = "Häuser, 日本 and emoji 👩‍👩‍👧 too"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(folder):
    """Prompt ids and log-softmax by mlx_lm alone."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm import load

    model, tokenizer = load(str(folder))

    def scores(text):
        ids = tokenizer.encode(text)
        logits = model(mx.array([ids]))[0].astype(mx.float32)
        return ids, np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))

    return scores


def text_of(chunks):
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
async def test_prompt_logprobs_equal_mlx_lms(folder, alone, max_tokens):
    ids, wanted = alone(PROMPT)
    async with real_openai(folder) as client:
        answer = await client.completions.create(
            model="tiny", prompt=PROMPT, echo=True, logprobs=2, max_tokens=max_tokens, temperature=0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
    choice = answer.choices[0]
    found = choice.logprobs
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == max_tokens
    assert choice.text.startswith(PROMPT)
    assert (choice.text == PROMPT) == (max_tokens == 0)
    assert choice.finish_reason == "length"
    count = len(ids) + max_tokens
    assert [len(part) for part in (found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset)] == [
        count
    ] * 4
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    for place in range(1, len(ids)):
        assert found.token_logprobs[place] == pytest.approx(wanted[place - 1, ids[place]], abs=1e-3)
        best = sorted(wanted[place - 1])[::-1][0]
        assert max(found.top_logprobs[place].values()) == pytest.approx(best, abs=1e-3)
    for offset, following in itertools.pairwise(found.text_offset):
        assert offset <= following <= len(choice.text)
    if max_tokens:
        assert found.text_offset[len(ids)] == len(PROMPT)
        greedy = wanted[-1].max()
        assert found.token_logprobs[len(ids)] == pytest.approx(greedy, abs=1e-3)


async def test_as_lm_evaluation_harness_reads_it(folder, alone):
    """Several prompts as ids, one token more than needed, the context's tokens cut off: its own arithmetic."""
    texts = ["the cat sat", "on the mat"]
    encoded = [alone(text)[0] for text in texts]
    body = {"prompt": encoded, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True, "temperature": 0}
    async with real_server(folder) as url:
        _, answer = await post(url, COMPLETIONS, body)
    for choice, ids, text in zip(answer["choices"], encoded, texts, strict=True):
        context = 2
        logprobs = choice["logprobs"]
        found = sum(logprobs["token_logprobs"][context:-1])
        greedy = all(
            token == max(top, key=top.get)
            for token, top in zip(logprobs["tokens"][context:-1], logprobs["top_logprobs"][context:-1], strict=True)
        )
        wanted = alone(text)[1]
        assert found == pytest.approx(
            sum(wanted[place - 1, ids[place]] for place in range(context, len(ids))), abs=1e-3
        )
        assert not math.isnan(found)
        assert greedy == all(wanted[place - 1].argmax() == ids[place] for place in range(context, len(ids)))


async def test_streamed_and_whole_agree(folder):
    async with real_server(folder) as url:
        for logprobs, prompt, max_tokens in itertools.product((None, 0, 3), (PROMPT, [PROMPT, "b"]), (0, 5)):
            asked = {"prompt": prompt, "echo": True, "max_tokens": max_tokens, "logprobs": logprobs}
            await check_agreement(url, asked | {"temperature": 0, "n": 2})


async def check_agreement(url, body):
    status, whole = await post(url, COMPLETIONS, body)
    assert status == 200
    chunks = await streamed(url, body)
    for choice in whole["choices"]:
        mine = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == [choice["finish_reason"]]
        if body["logprobs"] is None:
            assert choice["logprobs"] is None
            continue
        for name, values in choice["logprobs"].items():
            found = [value for part in mine if part["logprobs"] for value in part["logprobs"][name]]
            if name == "token_logprobs":
                assert found[1:] == pytest.approx(values[1:], abs=1e-4)
            elif name != "top_logprobs":
                assert found == values


async def streamed(url, body):
    async with aiohttp.ClientSession() as session, session.post(url + COMPLETIONS, json=body | {"stream": True}) as got:
        data = (await got.read()).decode()
    blocks = [block.removeprefix("data: ") for block in data.split("\n\n") if block.startswith("data: ")]
    assert blocks[-1] == "[DONE]"
    return [json.loads(block) for block in blocks[:-1]]


async def test_the_prompt_comes_first_and_ids_as_their_text(client: Client):
    answer = (await client.complete(prompt=[0, 1, 2], echo=True)).json["choices"][0]
    assert answer["text"] == "Hello, wörldHello, wörld!"
    chunks = (await client.complete(prompt="ab", echo=True, stream=True)).chunks
    assert chunks[0]["choices"][0] == {"index": 0, "text": "ab", "logprobs": None, "finish_reason": None}
    assert text_of(chunks) == "abHello, wörld!"


async def test_offsets_count_characters_of_the_text(client: Client):
    answer = (await client.complete(prompt=[2, 3], echo=True, logprobs=0)).json["choices"][0]
    assert answer["text"] == " wörld!Hello, wörld!"
    assert answer["logprobs"]["text_offset"] == [0, 6, 7, 12, 13, 19]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "max_tokens": -2}, "max_tokens"),
        ({"echo": "yes"}, "echo"),
        ({"echo": True, "logprobs": 6}, "logprobs"),
        ({"echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ({"suffix": "end"}, "suffix"),
    ],
)
async def test_what_is_refused(client: Client, fields, param):
    answer = await client.complete(**fields)
    assert answer.status == 400
    assert answer.error["param"] == param


async def test_chats_do_not_echo(client: Client):
    """OpenAI's chats have no such field: unknown ones are ignored."""
    assert (await client.chat(echo=True)).json["choices"][0]["message"]["content"] == "Hello, wörld!"
