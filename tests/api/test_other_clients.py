"""LiteLLM and LangChain's OpenAI client run a scenario each against the real server; skipped where they are missing."""

import asyncio
import json

import pytest

from .tiny_server import build_thinker, real_server

SCHEMA = {
    "title": "thing",
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks", "parameters": SCHEMA}}
HI = [{"role": "user", "content": "hi"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_thinker(tmp_path_factory.mktemp("thinker"))


@pytest.mark.filterwarnings("ignore")
async def test_litellm(folder, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks GitHub
    litellm = pytest.importorskip("litellm")
    litellm.telemetry = False
    async with real_server(folder) as url:
        common = {
            "model": "openai/tiny",
            "api_base": url + "/v1",
            "api_key": "unused",
            "messages": HI,
            "max_tokens": 400,
        }
        common |= {"extra_body": {"enable_thinking": False}, "num_retries": 0}
        plain = await litellm.acompletion(**common, logprobs=True, top_logprobs=2)
        assert len(plain.choices[0].logprobs.content) == plain.usage.completion_tokens
        text = ""
        async for chunk in await litellm.acompletion(**common, stream=True, response_format=FORMAT):
            text += chunk.choices[0].delta.content or ""
        assert 0 <= json.loads(text)["n"] <= 9
        called = await litellm.acompletion(**common, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
        message = called.choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "1"} for call in message.tool_calls]
        after = await litellm.acompletion(**common | {"messages": [*HI, message.model_dump(), *results]}, tools=[TOOL])
        assert after.usage.completion_tokens <= 400
        with pytest.raises(litellm.BadRequestError):
            await litellm.acompletion(**common | {"extra_body": {"guided_regex": "("}})


@pytest.mark.filterwarnings("ignore")
async def test_langchain(folder):
    langchain = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")
    async with real_server(folder) as url:
        chat = langchain.ChatOpenAI(
            base_url=url + "/v1", api_key="unused", model="tiny", max_tokens=400, max_retries=0,
            extra_body={"enable_thinking": False},
        )  # fmt: skip
        answer = await chat.bind(logprobs=True).ainvoke("hi")
        assert answer.response_metadata["logprobs"]["content"]
        pieces = [piece async for piece in chat.astream("hi")]
        assert pieces[-1].response_metadata or pieces[-1].usage_metadata or len(pieces) > 1
        made = await chat.with_structured_output(SCHEMA, method="json_schema").ainvoke("hi")
        assert 0 <= made["n"] <= 9
        tools = chat.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
        called = await tools.ainvoke("hi")
        (call,) = called.tool_calls
        assert call["name"] == "look"
        history = [messages.HumanMessage("hi"), called, messages.ToolMessage("seen", tool_call_id=call["id"])]
        assert isinstance((await chat.bind_tools([TOOL]).ainvoke(history)).content, str)
        with pytest.raises(Exception, match="tools"):
            await chat.bind(tool_choice="required").ainvoke("hi")
    await asyncio.sleep(0)
