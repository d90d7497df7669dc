"""Anthropic's own client against the real server: chat, stream, a tools round trip, a schema, errors."""

import json

import anthropic
import pytest

from .tiny_server import build_thinker, real_server

HI = [{"role": "user", "content": "hi"}]
TOOL = {
    "name": "look",
    "description": "Looks",
    "input_schema": {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_thinker(tmp_path_factory.mktemp("thinker"))


async def test_anthropics_client(folder):
    async with (
        real_server(folder) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="unused", max_retries=0) as client,
    ):
        answer = await client.messages.create(model="tiny", max_tokens=8, messages=HI, system="be brief")
        assert answer.stop_reason in ("max_tokens", "end_turn")
        assert answer.usage.output_tokens <= 8
        assert all(block.type == "text" for block in answer.content)

        thinking = {"type": "enabled", "budget_tokens": 1024}
        async with client.messages.stream(model="tiny", max_tokens=20, messages=HI, thinking=thinking) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert final.content[0].type == "thinking"
        assert text == "".join(block.text for block in final.content if block.type == "text")

        called = await client.messages.create(
            model="tiny", max_tokens=300, messages=HI, tools=[TOOL], tool_choice={"type": "tool", "name": "look"}
        )
        assert called.stop_reason == "tool_use"
        (use,) = [block for block in called.content if block.type == "tool_use"]
        assert set(use.input) == {"n"}
        async with client.messages.stream(
            model="tiny", max_tokens=1500, messages=HI, tools=[TOOL], tool_choice={"type": "any"}
        ) as stream:
            streamed = await stream.get_final_message()
        assert all(0 <= block.input["n"] <= 9 for block in streamed.content if block.type == "tool_use")
        assert streamed.stop_reason == "tool_use"

        result = {"type": "tool_result", "tool_use_id": use.id, "content": "seen"}
        history = [*HI, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
        after = await client.messages.create(model="tiny", max_tokens=5, messages=history, tools=[TOOL])
        assert after.usage.output_tokens <= 5

        schema = {"type": "json_schema", "schema": TOOL["input_schema"]}
        made = await client.messages.create(
            model="tiny", max_tokens=100, messages=HI, extra_body={"output_config": {"format": schema}}
        )
        assert 0 <= json.loads(made.content[0].text)["n"] <= 9

        count = await client.messages.count_tokens(model="tiny", messages=HI, system="be brief")
        assert count.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)

        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="other", max_tokens=8, messages=HI)
        with pytest.raises(anthropic.BadRequestError, match="tools"):
            await client.messages.create(model="tiny", max_tokens=8, messages=HI, tool_choice={"type": "any"})
