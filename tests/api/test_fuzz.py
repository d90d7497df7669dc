"""Whatever a client sends, the answer is the client's fault or a success: never 500."""

import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_troupe.api.errors import ApiError
from mlx_troupe.api.settings import ServerSettings
from mlx_troupe.api.translate import chat_generation, completion_generations
from mlx_troupe.api.wire.chat import ChatRequest
from mlx_troupe.api.wire.completions import CompletionRequest
from mlx_troupe.api.wire.decode import CHAT, COMPLETION, decode

from .fake_service import VOCAB_SIZE
from .serving import CHAT as CHAT_PATH
from .serving import COMPLETIONS, Client, serving

SETTINGS = ServerSettings()

numbers = st.integers() | st.integers(-3, 30) | st.floats(allow_nan=False, allow_infinity=False)
leaves = st.none() | st.booleans() | numbers | st.text(max_size=8) | st.sampled_from(["user", "text", "1", "auto"])
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
part = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]) | values, "text": st.text() | values})
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool"]) | values},
    optional={"content": st.text() | st.lists(part, max_size=3) | values, "name": values, "tool_calls": values},
)


def bodies(struct: type, name: str, special: st.SearchStrategy) -> st.SearchStrategy:
    """Bodies with a few fields each, so that most checks are reached."""
    names = sorted({*struct.__struct_fields__, "made_up"} - {name})
    others = st.dictionaries(st.sampled_from(names), values, max_size=6)
    return st.tuples(special, others).map(lambda drawn: {name: drawn[0]} | drawn[1])


chats = bodies(ChatRequest, "messages", st.lists(message, min_size=1, max_size=3) | values)
prompts = st.text() | st.lists(st.text(), max_size=3) | st.lists(st.integers(-1, VOCAB_SIZE), max_size=5) | values
completions = bodies(CompletionRequest, "prompt", prompts)


def check(call, body: bytes) -> None:
    """The call succeeds with plain values in range, or says whose fault it is."""
    try:
        found = call(body)
    except ApiError as error:
        refusal = error
    else:
        refusal = None
    if refusal is not None:
        assert 400 <= refusal.status < 500
        assert json.loads(refusal.body())["error"]["code"]
        return
    for generation in found if isinstance(found, list) else [found]:
        sampling = generation.sampling
        assert 1 <= generation.n <= 8
        assert math.isfinite(sampling.temperature)
        assert generation.max_tokens is None or generation.max_tokens >= 1


def chat(body: bytes):
    return chat_generation(decode(CHAT, body), SETTINGS, "id")


def completion(body: bytes):
    return completion_generations(decode(COMPLETION, body), SETTINGS, "id")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chats)
def test_chat_bodies(body):
    check(chat, json.dumps(body).encode())


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(completions)
def test_completion_bodies(body):
    check(completion, json.dumps(body).encode())


@settings(max_examples=200, deadline=None)
@given(st.binary() | st.text().map(str.encode))
def test_bytes(body):
    check(chat, body)
    check(completion, body)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_json(data):
    good = json.dumps(
        {"messages": [{"role": "user", "content": "h\u00efgh"}], "stop": ["a"], "temperature": 0.5}
    ).encode()
    start = data.draw(st.integers(0, len(good)))
    end = data.draw(st.integers(start, len(good)))
    check(chat, good[:start] + data.draw(st.binary(max_size=4)) + good[end:])


@pytest.fixture(scope="module")
def examples() -> list[tuple[str, bytes]]:
    """Bodies for the whole way over a socket."""
    found: list[tuple[str, bytes]] = []

    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(chats, completions, st.binary(max_size=50))
    def collect(chat_body, completion_body, junk):
        found.extend(
            [
                (CHAT_PATH, json.dumps(chat_body).encode()),
                (COMPLETIONS, json.dumps(completion_body).encode()),
                (CHAT_PATH, junk),
            ]
        )

    collect()
    return found


async def test_over_a_socket(examples):
    async with serving() as client:
        for path, body in examples:
            answer = await post(client, path, body)
            assert answer.status == 200 or 400 <= answer.status < 500, body
            if answer.status != 200:
                assert answer.error["message"]


async def post(client: Client, path: str, body: bytes):
    return await client.request("POST", path, data=body, headers={"Content-Type": "application/json"})
