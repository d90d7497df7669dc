"""What agents send, and what they get.

The fixtures are requests of Claude Code 2.1, Codex 0.171, opencode 1.18, Continue's cn 1.5 and aider 0.86, recorded
from the clients themselves against this server and cut down: texts are replaced, most tools left out, shapes kept. Of
clients that use tools it is the second request, with the result of a call.
"""

import json
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest

from mlx_troupe.api.clients import CLIENTS
from tests.api.serving import serving
from tests.api.tiny_server import build_thinker, real_server

FIXTURES = Path(__file__).parent / "fixtures"
ALL = [
    pytest.param(client, request, id=f"{client}-{place}")
    for client in CLIENTS
    for place, request in enumerate(json.loads((FIXTURES / f"{client}.json").read_text()))
]
LONGEST = {"/v1/responses": "max_output_tokens"}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    return build_thinker(tmp_path_factory.mktemp("thinker"))


@pytest.mark.parametrize(("client", "request_"), ALL)
async def test_the_request_is_understood(client, request_):
    async with serving() as server:
        body = request_["body"] | {"model": "default"}
        answer = await server.post(request_["path"], body, headers=request_["headers"])
        assert answer.status == 200, answer.body
        (asked,) = server.service.submitted
    offered = [tool.get("name") or tool.get("function", {}).get("name") for tool in body.get("tools", [])]
    functions = [tool for tool in body.get("tools", []) if tool.get("type") not in ("namespace", "web_search")]
    assert [tool["function"]["name"] for tool in asked.tools or ()] == offered[: len(functions)]
    roles = [message["role"] for message in asked.messages]
    assert "system" not in roles[1:]
    if not request_["path"].startswith("/v1/chat"):
        assert ("user", "user") not in pairwise(roles)
    assert any("Say what a.txt holds." in message["content"] for message in asked.messages)
    results = [message for message in asked.messages if message["role"] == "tool"]
    if any("from-the-tool" in json.dumps(part) for part in (body.get("messages") or body["input"])):
        (result,) = results
        assert "from-the-tool" in result["content"]
        (call,) = next(message["tool_calls"] for message in asked.messages if message.get("tool_calls"))
        assert call["id"] == result["tool_call_id"] == "call_abc123"
        assert "from-the-tool" in call["function"]["arguments"]


@pytest.mark.parametrize(("client", "request_"), ALL)
async def test_the_answer_is_whole_and_in_the_clients_own_form(client, request_, thinker):
    path = request_["path"].partition("?")[0]
    body = request_["body"] | {LONGEST.get(path, "max_tokens"): 24}
    async with (
        real_server(thinker) as url,
        aiohttp.ClientSession() as session,
        session.post(url + request_["path"], json=body, headers=request_["headers"]) as response,
    ):
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        text = (await response.read()).decode()
    assert text.endswith("\n\n")
    CHECKS[path](events_of(text), body)


def events_of(text):
    """Pairs of an event's name and its data."""
    found = []
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((fields.get("event"), fields["data"]))
    return found


def check_chat(events, body):
    assert events[-1] == (None, "[DONE]")
    chunks = [json.loads(data) for _, data in events[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert len(reasons) == 1
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert len(usages) == bool((body.get("stream_options") or {}).get("include_usage"))
    for usage in usages:
        assert usage["prompt_tokens"] > 0


def check_messages(events, body):
    names = [name for name, _ in events]
    assert [names[0], *names[-2:]] == ["message_start", "message_delta", "message_stop"]
    assert names.count("content_block_start") == names.count("content_block_stop") >= 1
    assert all(json.loads(data)["type"] == name for name, data in events)
    ending = json.loads(events[-2][1])
    assert ending["delta"]["stop_reason"] in ("end_turn", "max_tokens", "tool_use")
    assert ending["usage"]["output_tokens"] > 0


def check_responses(events, body):
    found = [json.loads(data) for _, data in events]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert found[0]["type"] == "response.created"
    assert found[-1]["type"] in ("response.completed", "response.incomplete")
    ending = found[-1]["response"]
    assert {tool["type"] for tool in ending["tools"]} == {"function"}, "what is not served is not claimed"
    assert ending["usage"]["output_tokens"] > 0
    assert ending["store"] is False


CHECKS = {"/v1/chat/completions": check_chat, "/v1/messages": check_messages, "/v1/responses": check_responses}


def test_no_fixture_tells_of_a_person_or_a_machine():
    for path in FIXTURES.iterdir():
        text = path.read_text()
        assert not any(word in text for word in ("/tmp", "/home", "/root", "Bearer", "account_uuid", "device_id"))
        assert len(text) < 8000
