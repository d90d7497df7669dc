"""OpenAI's responses: events, the response object, and going on from what is kept."""

import json

import openai
import pytest

from mlx_troupe.api.errors import ApiError
from mlx_troupe.api.keys import ApiKeys
from mlx_troupe.api.response_store import ResponseStore
from mlx_troupe.api.responses import responses_generation
from mlx_troupe.api.settings import ServerSettings
from mlx_troupe.api.wire.decode import RESPONSES, decode
from mlx_troupe.runtime.events import Failed, Finished, PrefillProgress, ReasoningDelta, TextDelta, ToolCallDelta, Usage

from .fake_service import FakeService
from .serving import serving
from .tiny_server import build_thinker, real_openai

PATH = "/v1/responses"
HI = {"input": "hi"}
USAGE = Usage(prompt_tokens=12, cached_tokens=5, completion_tokens=7, reasoning_tokens=2)
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "look", "parameters": PARAMETERS}


def everything(_):
    return [
        PrefillProgress(5, 12),
        ReasoningDelta("I "),
        ReasoningDelta("think"),
        TextDelta("It\u2028 is", (2, 3)),
        TextDelta(" so", (4,)),
        ToolCallDelta(0, "call_1", "look", ""),
        ToolCallDelta(0, "", "", '{"a": true}'),
        ToolCallDelta(1, "call_2", "look", "{}"),
        Finished("tool_calls", USAGE),
    ]


def generation(earlier=(), **fields):
    return responses_generation(decode(RESPONSES, json.dumps(HI | fields).encode()), ServerSettings(), "id", earlier)


def parsed(answer):
    found = []
    for block in answer.body.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_the_events_of_a_stream():
    async with serving(FakeService(everything)) as client:
        events = parsed(await client.post(PATH, HI | {"stream": True}))
        kept = (await client.get(f"{PATH}/{events[0]['response']['id']}")).json
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"),
        "output_item.done",
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert events[0]["response"]["output"] == []
    done = events[-1]["response"]
    assert done == kept
    assert [item["type"] for item in done["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert done["output"][1]["content"][0]["text"] == "It\u2028 is so"
    assert done["output"][2]["arguments"] == '{"a": true}'
    assert done["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    added = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    assert added == [0, 1, 2, 3]


async def test_a_cut_answer_is_incomplete():
    async with serving(FakeService(lambda _: [TextDelta("a", (1,)), Finished("length", USAGE)])) as client:
        events = parsed(await client.post(PATH, HI | {"stream": True}))
        assert events[-1]["type"] == "response.incomplete"
        assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_errors():
    script = [PrefillProgress(1, 2), Failed("grammar_failed", "no")]
    async with serving(FakeService(lambda _: list(script))) as client:
        assert (await client.post(PATH, HI | {"stream": True})).status == 400  # nothing was visible yet
    async with serving(FakeService(lambda _: [TextDelta("a", (1,)), *script])) as client:
        events = parsed(await client.post(PATH, HI | {"stream": True}))
        assert events[-1]["type"] == "error"
        assert events[-1]["code"] == "grammar_failed"
        assert (await client.get(f"{PATH}/{events[0]['response']['id']}")).status == 404


async def test_going_on_from_an_answer():
    async with serving() as client:
        first = (await client.post(PATH, HI | {"instructions": "be nice"})).json
        assert first["status"] == "completed"
        assert first["output"][0]["content"][0]["text"] == "Hello, wörld!"
        await client.post(PATH, {"input": "more", "previous_response_id": first["id"]})
        assert [dict(message) for message in client.service.submitted[1].messages] == [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello, wörld!"},
            {"role": "user", "content": "more"},
        ]
        assert (await client.request("DELETE", f"{PATH}/{first['id']}")).json["deleted"] is True
        gone = await client.post(PATH, {"input": "more", "previous_response_id": first["id"]})
        assert gone.status == 404
        assert (await client.request("DELETE", f"{PATH}/{first['id']}")).status == 404


async def test_what_is_not_to_be_stored_is_not():
    async with serving() as client:
        name = (await client.post(PATH, HI | {"store": False})).json["id"]
        assert (await client.get(f"{PATH}/{name}")).status == 404


async def test_only_its_key_sees_a_response():
    a, b = ({"Authorization": f"Bearer {letter * 10}"} for letter in "ab")
    async with serving(keys=ApiKeys([("a", "a" * 10), ("b", "b" * 10)])) as client:
        name = (await client.post(PATH, HI, headers=a)).json["id"]
        assert (await client.get(f"{PATH}/{name}", headers=a)).status == 200
        assert (await client.get(f"{PATH}/{name}", headers=b)).status == 404
        assert (await client.request("DELETE", f"{PATH}/{name}", headers=b)).status == 404
        assert (await client.post(PATH, HI | {"previous_response_id": name}, headers=b)).status == 404


def test_the_store_is_bounded_in_bytes_and_age():
    now = [0.0]
    store = ResponseStore(1000, 10.0, lambda: now[0])
    message = ({"role": "user", "content": "a" * 100},)
    for number in range(50):
        store.put(str(number), "me", message, b"b" * 100)
        assert store.size_bytes <= 1000
    assert store.get("49", "me")
    assert store.get("0", "me") is None
    store.put("large", "me", message, b"b" * 2000)
    assert store.get("large", "me") is None
    assert store.get("49", "me")
    now[0] = 10.0
    assert store.get("49", "me") is None
    store.put("new", "me", message, b"b")
    assert store.size_bytes < 300


def test_items_of_one_turn_are_one_message():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "look"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "seen"},
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    assert list(generation(input=items).messages) == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "look", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "x"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"reasoning": {"effort": "x" * 1000}}, "reasoning.effort"),
    ],
)
def test_what_cannot_be_had_is_named(fields, param):
    with pytest.raises(ApiError) as caught:
        generation(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param


async def test_openais_client(tmp_path):
    async with real_openai(build_thinker(tmp_path)) as client:
        schema = {
            "type": "object",
            "properties": {"n": {"enum": [1, 2]}},
            "required": ["n"],
            "additionalProperties": False,
        }
        quiet = {"reasoning": {"effort": "none"}, "model": "tiny"}
        text = {"format": {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}}
        answer = await client.responses.create(input="hi", text=text, max_output_tokens=100, **quiet)
        assert json.loads(answer.output_text)["n"] in (1, 2)
        called = await client.responses.create(
            input="hi", tools=[TOOL], tool_choice={"type": "function", "name": "look"}, max_output_tokens=400, **quiet
        )
        (call,) = [item for item in called.output if item.type == "function_call"]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "seen"}
        after = await client.responses.create(
            input=[result], previous_response_id=called.id, max_output_tokens=4, tools=[TOOL], **quiet
        )
        assert after.usage.output_tokens <= 4
        stream = await client.responses.create(input="hi", max_output_tokens=12, stream=True, model="tiny")
        kinds = [event.type async for event in stream]
        assert kinds[0] == "response.created"
        assert kinds[-1] in ("response.completed", "response.incomplete")
        assert "response.reasoning_text.delta" in kinds
        assert (await client.responses.retrieve(called.id)).id == called.id
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(input="hi", previous_response_id="resp_x", model="tiny")
