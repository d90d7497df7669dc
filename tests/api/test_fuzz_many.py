"""Tens of thousands of hostile bodies: through the checks, and over HTTP to a real runtime. No 500, nothing stuck."""

import asyncio
import contextlib
import json
import random

import aiohttp
import pytest

from mlx_troupe.api.errors import ApiError
from mlx_troupe.api.routes_embeddings import embedding_query
from mlx_troupe.api.server import listening
from mlx_troupe.api.settings import ServerSettings
from mlx_troupe.api.wire.chat import ChatRequest
from mlx_troupe.api.wire.completions import CompletionRequest
from mlx_troupe.api.wire.decode import EMBEDDINGS, decode
from mlx_troupe.api.wire.embeddings import EmbeddingRequest
from mlx_troupe.api.wire.messages import MessagesRequest
from mlx_troupe.api.wire.responses import ResponsesRequest
from mlx_troupe.runtime import Runtime

from .test_fuzz import chat, check, completion
from .tiny_server import build_thinker

CHECKED, SENT = 60_000, 6_000
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
VALUES = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        5,
        1.5,
        1e308,
        10**30,
        -0.0,
        "",
        "a",
        "auto",
        "none",
        "required",
        "\x00",
        "ü" * 50,
    ),
    *("[" * 500, "\ud83d\ude00", [], {}, [None], ["a"], [""], [1], [[1]], {"type": "text"}, {"a": {"a": {"a": []}}}),
    *({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}, [TOOL], HI),
    *(
        [{"role": "user"}],
        [{"role": "tool", "content": [{"type": "image_url"}]}],
        {"5": 1},
        "(",
        "a{1,9}",
        'root ::= "a"',
    ),
)
ROUTES = {
    "/v1/chat/completions": (ChatRequest, {"messages": HI}),
    "/v1/completions": (CompletionRequest, {"prompt": "hi"}),
    "/v1/messages": (MessagesRequest, {"messages": HI, "max_tokens": 4}),
    "/v1/messages/count_tokens": (MessagesRequest, {"messages": HI}),
    "/v1/responses": (ResponsesRequest, {"input": "hi"}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "hi"}),
    "/tokenize": (None, {"prompt": "hi"}),
    "/detokenize": (None, {"tokens": [1]}),
}


def body_of(rng: random.Random, struct: type | None, base: dict) -> bytes:
    """A good body with a few fields made bad, a value deep inside one changed, or some bytes damaged."""
    names = struct.__struct_fields__ if struct is not None else ("prompt", "tokens", "model", "content")
    body = base | {rng.choice(names): rng.choice(VALUES) for _ in range(rng.randrange(4))}
    if rng.random() < 0.9 and struct is not None:
        body.setdefault("max_tokens", rng.choice((0, 1, 3, 8)))
    data = json.dumps(body).encode()
    if rng.random() < 0.2:
        at = rng.randrange(len(data))
        data = data[:at] + bytes(rng.randrange(256) for _ in range(rng.randrange(4))) + data[at + rng.randrange(4) :]
    return data


@pytest.mark.heavy
def test_bodies_through_the_checks():
    rng = random.Random(4)
    settings = ServerSettings()
    for _ in range(CHECKED // 3):
        check(chat, body_of(rng, ChatRequest, {"messages": HI}))
        check(completion, body_of(rng, CompletionRequest, {"prompt": "hi"}))
        data = body_of(rng, EmbeddingRequest, {"input": "a"})
        with contextlib.suppress(ApiError):  # anything else would fail the test
            embedding_query(decode(EMBEDDINGS, data), settings, "id")


@pytest.mark.heavy
async def test_bodies_over_http(tmp_path):
    rng = random.Random(5)
    found: dict[int, int] = {}
    async with (
        Runtime(model=str(build_thinker(tmp_path)), max_rows=32, max_tokens_default=8) as runtime,
        listening(runtime, ServerSettings(port=0, access_log=False, request_timeout_s=20)) as url,
        aiohttp.ClientSession() as session,
    ):
        places = asyncio.Semaphore(16)

        async def one(path: str, data: bytes) -> None:
            async with places, asyncio.timeout(60):
                headers = {"Content-Type": "application/json"}
                async with session.post(url + path, data=data, headers=headers) as response:
                    said = await response.read()
            found[response.status] = found.get(response.status, 0) + 1
            assert response.status < 500 or response.status == 504, (path, data, said)
            assert b"internal_error" not in said, (path, data, said)

        for _ in range(SENT // 500):
            chosen = [rng.choice(list(ROUTES)) for _ in range(500)]
            await asyncio.gather(*(one(path, body_of(rng, *ROUTES[path])) for path in chosen))
        statistics = runtime.statistics()
        assert statistics.running == statistics.prefilling == statistics.waiting == 0, "no request is stuck"
    print(found)
    assert found[200] > SENT // 20
