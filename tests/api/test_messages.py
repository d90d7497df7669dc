"""Anthropic's messages over a fake service: what comes in, what goes out, event by event."""

import json

import pytest

from mlx_troupe.api.anthropic import messages_generation
from mlx_troupe.api.errors import ApiError
from mlx_troupe.api.settings import ServerSettings
from mlx_troupe.api.wire.decode import MESSAGES as DECODER
from mlx_troupe.api.wire.decode import decode
from mlx_troupe.runtime.events import Failed, Finished, PrefillProgress, ReasoningDelta, TextDelta, ToolCallDelta, Usage

from .fake_service import FakeService
from .serving import serving

PATH = "/v1/messages"
HI = {"model": "fake/model", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
THINK = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
USAGE = Usage(prompt_tokens=12, cached_tokens=5, completion_tokens=7)
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def generation(**fields):
    return messages_generation(decode(DECODER, json.dumps(HI | fields).encode()), ServerSettings(), "id")


def everything(_):
    return [
        PrefillProgress(5, 12),
        TextDelta("", (1,)),
        ReasoningDelta("I "),
        ReasoningDelta("think"),
        TextDelta("It\u2028 is", (2, 3)),
        ToolCallDelta(0, "call_1", "look", ""),
        ToolCallDelta(0, "", "", '{"a": '),
        ToolCallDelta(0, "", "", "1}"),
        ToolCallDelta(1, "call_2", "look", '{"a": 2}'),
        Finished("tool_calls", USAGE),
    ]


def parsed(answer):
    found = []
    for block in answer.body.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_a_whole_answer():
    async with serving() as client:
        answer = await client.post(PATH, HI)
        assert answer.status == 200
        body = answer.json
        assert body["id"].startswith("msg_")
        assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "fake/model")
        assert body["content"] == [{"type": "text", "text": "Hello, wörld!"}]
        assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
        assert body["usage"]["input_tokens"] == 1
        assert body["usage"]["cache_read_input_tokens"] == 1
        assert answer.headers["Request-Id"]


async def test_the_events_of_a_stream():
    async with serving(FakeService(everything)) as client:
        events = parsed(await client.post(PATH, HI | THINK | {"stream": True}))
    assert [event["type"] for event in events] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [start["index"] for start in starts] == [0, 1, 2, 3]
    assert [start["content_block"]["type"] for start in starts] == ["thinking", "text", "tool_use", "tool_use"]
    assert starts[2]["content_block"] == {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
    partial = [event["delta"]["partial_json"] for event in events if event.get("delta", {}).get("partial_json")]
    assert partial == ['{"a": ', "1}", '{"a": 2}']
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 7
    assert events[0]["message"]["usage"]["input_tokens"] == 2


async def test_thoughts_that_nobody_asked_for_are_left_out():
    async with serving(FakeService(everything)) as client:
        events = parsed(await client.post(PATH, HI | {"stream": True}))
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [start["content_block"]["type"] for start in starts] == ["text", "tool_use", "tool_use"]
    assert [start["index"] for start in starts] == [0, 1, 2]


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (Finished("stop", USAGE), "end_turn", None),
        (Finished("stop", USAGE, 7), "end_turn", None),
        (Finished("stop", USAGE, "END"), "stop_sequence", "END"),
        (Finished("length", USAGE), "max_tokens", None),
    ],
)
async def test_stop_reasons(end, reason, sequence):
    async with serving(FakeService(lambda _: [TextDelta("a", (1,)), end])) as client:
        events = parsed(await client.post(PATH, HI | {"stream": True}))
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


async def test_errors_have_anthropics_shape():
    async with serving() as client:
        answer = await client.post(PATH, HI | {"max_tokens": 0})
        assert answer.status == 400
        assert answer.json["type"] == "error"
        assert answer.json["error"]["type"] == "invalid_request_error"
        assert "max_tokens" in answer.json["error"]["message"]
        assert (await client.post(PATH, HI | {"model": "other"})).json["error"]["type"] == "not_found_error"
        assert (await client.request("POST", PATH, data=b"{")).json["type"] == "error"


async def test_an_error_in_a_stream_is_an_event_and_the_last_one():
    script = [TextDelta("a", (1,)), Failed("grammar_failed", "no more")]
    async with serving(FakeService(lambda _: script)) as client:
        events = parsed(await client.post(PATH, HI | {"stream": True}))
    assert events[-1] == {"type": "error", "error": {"type": "invalid_request_error", "message": "no more"}}
    assert "message_stop" not in [event["type"] for event in events]


async def test_count_tokens():
    async with serving() as client:
        body = {"messages": HI["messages"], "system": "be nice"}
        assert (await client.post(PATH + "/count_tokens", body)).json == {"input_tokens": 9}


def test_a_conversation_with_tools():
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "look"},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "one"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "bad", "is_error": True},
                {"type": "text", "text": "go on"},
            ],
        },
    ]
    system = [{"type": "text", "text": "s1"}, {"type": "text", "text": "s2", "cache_control": {"type": "ephemeral"}}]
    found = generation(messages=blocks, system=system, tools=[TOOL | {"cache_control": {"type": "ephemeral"}}])
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    assert list(found.messages) == [
        {"role": "system", "content": "s1\n\ns2"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "look", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "t1", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: bad"},
        {"role": "user", "content": "go on"},
    ]
    assert found.tools[0]["function"]["parameters"] == TOOL["input_schema"]


def test_options():
    assert generation().template_args == {"enable_thinking": False}
    thinking = generation(**THINK)
    assert thinking.template_args == {"enable_thinking": True}
    assert thinking.thinking_budget == 1024
    assert generation(tools=[TOOL], tool_choice={"type": "any"}).tool_choice == "required"
    named = generation(tools=[TOOL], tool_choice={"type": "tool", "name": "look", "disable_parallel_tool_use": True})
    assert (named.tool_choice, named.tool_name, named.parallel_tool_calls) == ("named", "look", False)
    assert generation(tools=[TOOL], tool_choice={"type": "none"}).tools is None
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    assert generation(output_config={"format": schema}).grammar == generation(output_format=schema).grammar
    assert generation(stop_sequences=["a"], top_k=4.0, temperature=0).sampling.top_k == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "a"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "x"}}, "tool_choice.type"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ],
)
def test_what_cannot_be_had_is_named(fields, param):
    with pytest.raises(ApiError) as caught:
        generation(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param


async def test_turns_are_joined_as_anthropic_joins_them(client):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "system", "content": "a reminder"},
        {"role": "assistant", "content": "c"},
        {"role": "system", "content": "another"},
        {"role": "user", "content": "d"},
    ]
    body = {"max_tokens": 5, "system": [{"type": "text", "text": "x"}], "messages": messages}
    assert (await client.post("/v1/messages", body)).status == 200
    (asked,) = client.service.submitted
    assert [(message["role"], message["content"]) for message in asked.messages] == [
        ("system", "x"),
        ("user", "a\n\nb\n\na reminder"),
        ("assistant", "c"),
        ("user", "another\n\nd"),
    ]
