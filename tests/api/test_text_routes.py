"""Texts to tokens and back, over HTTP."""

import pytest

from .serving import serving
from .tiny_server import build_thinker, post, real_server


@pytest.mark.parametrize("text", ["", "hello wörld", "\u2028 \U0001f469\u200d\U0001f680", "a\x00b", "x" * 10_000])
async def test_there_and_back(text, tmp_path):
    async with real_server(build_thinker(tmp_path)) as url:
        status, found = await post(url, "/tokenize", {"prompt": text})
        assert status == 200
        assert found["count"] == len(found["tokens"])
        status, back = await post(url, "/detokenize", {"tokens": found["tokens"]})
        assert (status, back["prompt"], back["content"]) == (200, text, text)
        status, error = await post(url, "/detokenize", {"tokens": [10**6]})
        assert (status, error["error"]["param"]) == (400, "tokens")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "x"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
async def test_what_cannot_be_done_is_named(path, body, param):
    async with serving() as client:
        answer = await client.post(path, body)
        assert answer.status in (400, 404)
        assert answer.error["param"] == param


async def test_llama_cpps_name_for_the_text():
    async with serving() as client:
        assert (await client.post("/tokenize", {"content": "ab"})).json["count"] == 2
