"""What is refused before any work, and how."""

import asyncio
import io
import json

import pytest

from .serving import CHAT, COMPLETIONS, HI, Client, serving

JSON = {"Content-Type": "application/json"}


async def refused(client: Client, status: int, code: str, param: str | None = None, **arguments) -> str:
    answer = await client.request("POST", arguments.pop("path", CHAT), **arguments)
    assert answer.status == status
    assert answer.error["code"] == code
    assert answer.error["param"] == param
    assert answer.error["type"] == "invalid_request_error"
    assert client.service.submitted == []
    return answer.error["message"]


async def test_a_prompt_of_one_megabyte_is_served(client: Client):
    answer = await client.complete(prompt="x" * 1_000_000)
    assert answer.status == 200
    assert answer.json["usage"]["prompt_tokens"] == 1_000_000


async def test_body_size(client: Client):
    await refused(client, 413, "body_too_large", data=io.BytesIO(b" " * (4 << 20) + b"{}"), headers=JSON)


async def test_body_size_without_a_length():
    async def body():
        for _ in range(100):
            yield b" " * 1000

    async with serving(max_body_bytes=50_000) as client:
        await refused(client, 413, "body_too_large", data=body(), headers=JSON)


async def test_body_of_the_largest_size():
    body = json.dumps(HI).encode()
    async with serving(max_body_bytes=len(body)) as client:
        assert (await client.request("POST", CHAT, data=body, headers=JSON)).status == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_content_type(client: Client, content_type):
    message = await refused(client, 415, "unsupported_content_type", data=b"{}", headers={"Content-Type": content_type})
    assert "application/json" in message


async def test_missing_content_type(client: Client):
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
    assert b"415" in await reader.readline()
    writer.close()
    await writer.wait_closed()


async def test_content_type_with_charset(client: Client):
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert (await client.request("POST", CHAT, data=json.dumps(HI), headers=headers)).status == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
async def test_content_encoding(client: Client, encoding):
    headers = JSON | {"Content-Encoding": encoding}
    await refused(client, 415, "unsupported_content_encoding", data=b"\x1f\x8b", headers=headers)


async def test_a_body_that_never_comes():
    async with serving(body_timeout_s=0.05) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 100\r\n\r\n".encode())
        assert b"408" in await reader.readline()
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b'{"tools": ' + b"[" * 100_000,
        b'{"tools": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "seed": 1e999}',
    ],
)
async def test_garbage(client: Client, body):
    for path in (CHAT, COMPLETIONS):
        answer = await client.request("POST", path, data=body, headers=JSON)
        assert answer.status == 400
        assert answer.error["type"] == "invalid_request_error"


async def test_message_count(client: Client):
    messages = [{"role": "user", "content": "x"}] * 2049
    await refused(client, 400, "too_many_messages", "messages", json={"messages": messages})


async def test_prompt_count(client: Client):
    await refused(client, 400, "too_many_prompts", "prompt", json={"prompt": ["x"] * 65}, path=COMPLETIONS)


async def test_wrong_types_name_the_field(client: Client):
    await refused(client, 400, "invalid_type", "messages[0].content", json={"messages": [{"content": 1}]})
    await refused(client, 400, "invalid_type", "stop[1]", json=HI | {"stop": ["a", 1]})


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8000", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("192.168.1.4", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
    ],
)
async def test_host(client: Client, host, status):
    answer = await client.get("/v1/models", headers={"Host": host})
    assert answer.status == status
    if status == 403:
        assert answer.error["code"] == "host_not_allowed"


async def test_allowed_hosts():
    async with serving(allowed_hosts=("my-mac.local",)) as client:
        assert (await client.get("/livez", headers={"Host": "My-Mac.local:8000"})).status == 200
        assert (await client.get("/livez", headers={"Host": "other.local"})).status == 403


async def test_no_cross_origin_access(client: Client):
    preflight = {
        "Origin": "https://evil.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    answer = await client.request("OPTIONS", CHAT, headers=preflight)
    assert answer.status == 405
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]


async def test_unknown_routes_and_methods(client: Client):
    answer = await client.get("/nope")
    assert answer.status == 404
    assert answer.error["code"] == "not_found"
    answer = await client.get(CHAT)
    assert answer.status == 405
    assert answer.error["code"] == "method_not_allowed"
    assert await client.metric('mlx_troupe_http_requests_total{route="unmatched",status="404"}') == 1


@pytest.mark.parametrize("given", ["abc-1.2:3/4", "x" * 128])
async def test_request_ids_are_echoed(client: Client, given):
    answer = await client.post(CHAT, HI, headers={"X-Request-Id": given})
    assert answer.headers["X-Request-Id"] == given
    answer = await client.post(CHAT, HI | {"stream": True}, headers={"X-Request-Id": given})
    assert answer.headers["X-Request-Id"] == given


@pytest.mark.parametrize("given", ["x" * 129, "a b", "a;b", "", "<script>"])
async def test_odd_request_ids_are_replaced(client: Client, given):
    answer = await client.get("/livez", headers={"X-Request-Id": given})
    assert answer.headers["X-Request-Id"] not in ("", given)


async def test_unexpected_exceptions_tell_only_an_id(client: Client, caplog):
    client.service.refusals.append(ValueError("secret /path"))
    answer = await client.chat()
    assert answer.status == 500
    assert answer.error["code"] == "internal_error"
    assert "secret" not in answer.body.decode()
    assert answer.headers["X-Request-Id"] in answer.error["message"]
    assert answer.headers["X-Request-Id"] in caplog.text
    assert "secret" in caplog.text
