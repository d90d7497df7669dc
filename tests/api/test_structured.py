"""Structured output, tools and thoughts over HTTP with OpenAI's client and a real (random) model."""

import asyncio
import json

import openai
import pytest

from .tiny_server import build_thinker, post, real_openai, real_server

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "s": {"type": "string", "maxLength": 4}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {"type": "function", "function": {"name": "first", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {"name": "second", "parameters": {"type": "object", "properties": {"b": {"type": "boolean"}}}},
    },
]
QUIET = {"extra_body": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_thinker(tmp_path_factory.mktemp("thinker"))


async def collected(stream):
    """One choice's parts of a stream, as a whole answer has them."""
    content, thought, calls, reason = "", "", {}, None
    async for chunk in stream:
        for choice in chunk.choices:
            assert reason is None, "something came after the finish reason"
            content += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.id:
                    assert call.index == len(calls)
                    calls[call.index] = [call.function.name, ""]
                calls[call.index][1] += call.function.arguments or ""
            reason = choice.finish_reason
    return content, thought, list(calls.values()), reason


@pytest.mark.parametrize("thinking", [False, True])
async def test_json_schema_whole_and_streamed_agree(folder, thinking):
    async with real_openai(folder) as client:
        for seed in range(4):
            request = {
                "model": "tiny",
                "messages": MESSAGES,
                "response_format": FORMAT,
                "seed": seed,
                "max_tokens": 300,
                "extra_body": {"enable_thinking": thinking, "thinking_budget": 10},
            }
            answer = await client.chat.completions.create(**request)
            choice = answer.choices[0]
            assert choice.finish_reason == "stop"
            found = json.loads(choice.message.content)
            assert 0 <= found["n"] <= 99
            assert len(found["s"]) <= 4
            thought = getattr(choice.message, "reasoning_content", "")
            assert bool(thought) is thinking
            spent = answer.usage.completion_tokens_details.reasoning_tokens
            assert (10 <= spent <= 12) if thinking else spent == 0
            streamed = await collected(await client.chat.completions.create(**request, stream=True))
            assert streamed == (choice.message.content, thought, [], "stop")


@pytest.mark.parametrize(
    ("fields", "ok"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: text.lstrip().startswith("{")),
        ({"guided_choice": ["red", "blue"]}, lambda text: text in ("red", "blue")),
        ({"guided_regex": "[ab]{3}"}, lambda text: len(text) == 3 and set(text) <= set("ab")),
        ({"grammar": 'root ::= "x" [0-9]'}, lambda text: text[0] == "x" and text[1].isdigit() and len(text) == 2),
        ({"guided_grammar": 'start: "y"'}, lambda text: text == "y"),
        ({"structured_outputs": {"choice": ["z"]}}, lambda text: text == "z"),
        ({"guided_json": {"type": "boolean"}}, lambda text: text in ("true", "false")),
        ({"json_schema": {"const": 7}}, lambda text: text == "7"),
        ({"response_format": {"type": "regex", "regex": "q"}}, lambda text: text == "q"),
        ({"response_format": {"type": "text"}}, lambda text: True),
    ],
)
async def test_every_way_to_ask(folder, fields, ok):
    async with real_server(folder) as url:
        body = {"messages": MESSAGES, "max_tokens": 20, "enable_thinking": False} | fields
        status, answer = await post(url, "/v1/chat/completions", body)
        assert status == 200, answer
        assert ok(answer["choices"][0]["message"]["content"])
        if "response_format" not in fields:
            status, answer = await post(url, "/v1/completions", {"prompt": "hi", "max_tokens": 20} | fields)
            assert status == 200, answer
            assert ok(answer["choices"][0]["text"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"tools": TOOLS * 2}, "tools[2].function.name"),
        ({"tools": TOOLS * 70}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"thinking_budget": -1}, "thinking_budget"),
    ],
)
async def test_what_cannot_be_had_is_400_and_named(folder, fields, param):
    async with real_server(folder) as url:
        for stream in (False, True):
            status, answer = await post(url, "/v1/chat/completions", {"messages": MESSAGES, "stream": stream} | fields)
            assert status == 400
            assert answer["error"]["param"] == param


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "first"}}])
@pytest.mark.parametrize("thinking", [False, True])
async def test_forced_calls_are_valid_whole_and_streamed(folder, choice, thinking):
    async with real_openai(folder) as client:
        for seed in range(4):
            request = {
                "model": "tiny",
                "messages": MESSAGES,
                "tools": TOOLS,
                "tool_choice": choice,
                "seed": seed,
                "max_tokens": 1500,
                "extra_body": {"enable_thinking": thinking, "thinking_budget": 5},
            }
            answer = (await client.chat.completions.create(**request)).choices[0]
            assert answer.finish_reason == "tool_calls"
            assert answer.message.content is None
            for call in answer.message.tool_calls:
                arguments = json.loads(call.function.arguments)
                assert call.function.name in ("first", "second")
                if call.function.name == "first":
                    assert 0 <= arguments["n"] <= 99
            calls = [[call.function.name, json.loads(call.function.arguments)] for call in answer.message.tool_calls]
            content, _, streamed, reason = await collected(await client.chat.completions.create(**request, stream=True))
            assert [[name, json.loads(text)] for name, text in streamed] == calls
            assert (content, reason) == ("", "tool_calls")


async def test_one_call_when_parallel_ones_are_not_wanted(folder):
    async with real_openai(folder) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **QUIET
        )
        assert len(answer.choices[0].message.tool_calls) == 1


async def test_a_forced_call_that_is_cut_is_text_with_length(folder):
    async with real_openai(folder) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=6, **QUIET
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "length"
        assert choice.message.tool_calls is None
        assert choice.message.content.startswith("[")


async def test_results_are_fed_back(folder):
    async with real_openai(folder) as client:
        first = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="required", **QUIET
        )
        message = first.choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in message.tool_calls]
        history = [*MESSAGES, message.model_dump(exclude_none=True), *results]
        answer = await client.chat.completions.create(
            model="tiny", messages=history, tools=TOOLS, max_tokens=5, **QUIET
        )
        assert answer.usage.prompt_tokens > first.usage.prompt_tokens


async def test_the_thought_can_be_left_out_or_named_twice(folder):
    async with real_server(folder) as url:
        body = {"messages": MESSAGES, "thinking_budget": 4, "max_tokens": 12, "seed": 1}
        _, plain = await post(url, "/v1/chat/completions", body)
        message = plain["choices"][0]["message"]
        assert message["reasoning_content"]
        assert "reasoning" not in message
        assert "<think>" not in json.dumps(plain)
        assert "</think>" not in json.dumps(plain)
        _, both = await post(url, "/v1/chat/completions", body | {"include_reasoning": True})
        found = both["choices"][0]["message"]
        assert found["reasoning"] == found["reasoning_content"] == message["reasoning_content"]
        _, neither = await post(url, "/v1/chat/completions", body | {"reasoning": {"exclude": True}})
        assert not {"reasoning", "reasoning_content"} & set(neither["choices"][0]["message"])
        assert neither["choices"][0]["message"]["content"] == message["content"]


async def test_a_grammar_that_fails_midway_is_an_error_event_and_others_go_on(folder):
    async with real_openai(folder) as client:
        bomb = {
            "model": "tiny",
            "messages": MESSAGES,
            "max_tokens": 3000,
            "temperature": 0,
            "logit_bias": {str(ord("a") - 33): 100},
            "extra_body": {"guided_regex": "(((a{1,1000}){1,1000}){1,1000})b", "enable_thinking": False},
        }

        async def streamed():
            async for _ in await client.chat.completions.create(**bomb, stream=True):
                pass

        good = {"model": "tiny", "messages": MESSAGES, "response_format": FORMAT, **QUIET}
        results = await asyncio.gather(
            streamed(),
            client.chat.completions.create(**bomb),
            *(client.chat.completions.create(**good, seed=seed) for seed in range(4)),
            return_exceptions=True,
        )
        assert isinstance(results[0], openai.APIError)
        assert isinstance(results[1], openai.BadRequestError)
        assert results[1].code == "grammar_failed"
        assert all(json.loads(answer.choices[0].message.content) for answer in results[2:])
