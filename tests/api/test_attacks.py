"""Connections that mean harm, on real sockets; other clients do not notice."""

import asyncio
import itertools
import socket
import time

import pytest

from mlx_troupe.api.listener import listen
from mlx_troupe.runtime.events import Finished, TextDelta, Usage

from .fake_service import FakeService
from .serving import CHAT, HI, serving

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"


async def closed(reader, patience_s=5):
    """Wait until the server has closed; what it said before."""
    async with asyncio.timeout(patience_s):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize("start", [b"P", b"POST /v1/chat/completions HTTP/1.1\r\n", HEAD + b"X-A: "])
async def test_slow_headers_are_cut(start):
    async with serving(header_timeout_s=0.1) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(start)
        assert await closed(reader) == b""
        writer.close()


async def test_headers_that_drip_are_cut_all_the_same():
    async with serving(header_timeout_s=0.2) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)

        async def drip():
            while True:
                writer.write(b"A")
                await asyncio.sleep(0.02)

        dripping = asyncio.ensure_future(drip())
        began = time.monotonic()
        await closed(reader)
        assert time.monotonic() - began < 2
        dripping.cancel()
        writer.close()


async def test_the_second_request_of_a_connection_has_the_same_time():
    async with serving(header_timeout_s=0.2) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"live")
        await asyncio.sleep(0.3)  # idle is not slow
        writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"live")
        writer.write(b"GET /l")
        await closed(reader)
        writer.close()


async def test_an_answer_that_takes_long_is_not_slow_headers():
    def script(_):
        return [TextDelta("a", (1,)), Finished("stop", Usage())]

    async with serving(FakeService(script), header_timeout_s=0.05, keepalive_interval_s=0.05) as client:
        assert (await client.chat(stream=True)).status == 200


async def test_too_many_connections_get_503_and_places_come_back():
    async with serving(max_connections=5) as client:
        pairs = [await asyncio.open_connection("127.0.0.1", client.port) for _ in range(5)]
        await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        assert (await closed(reader)).startswith(b"HTTP/1.1 503")
        writer.close()
        for _, opened in pairs:
            opened.close()
        await asyncio.sleep(0.05)
        assert (await client.chat()).status == 200


async def test_one_address_cannot_take_all_connections():
    async with serving(max_connections_per_address=2) as client:
        pairs = [await asyncio.open_connection("127.0.0.1", client.port) for _ in range(2)]
        await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        assert (await closed(reader)).startswith(b"HTTP/1.1 503")
        for _, opened in [*pairs, (reader, writer)]:
            opened.close()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"".join(b"X-%d: a\r\n" % number for number in range(10_000)) + b"\r\n",
        HEAD + b"X-A: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01 this is TLS",
        b"GET / HTTP/9.9\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\na",
        HEAD + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_broken_requests_are_400_or_cut(data):
    async with serving(header_timeout_s=0.3, body_timeout_s=0.3) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(data)
        answer = await closed(reader)
        assert not answer or answer.split()[1] in (b"400", b"408", b"414", b"431"), answer[:80]
        writer.close()
        assert (await client.chat()).status == 200


async def test_a_body_of_100_mb_is_refused_unread():
    async with serving() as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(HEAD + b"Content-Type: application/json\r\nContent-Length: 100000000\r\n\r\n" + b"a" * 65536)
        async with asyncio.timeout(5):
            assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        writer.close()
        assert not client.service.submitted


async def test_half_bodies_are_cut():
    async with serving(body_timeout_s=0.1) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(HEAD + b"Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{")
        async with asyncio.timeout(5):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()


async def test_a_storm_of_idle_and_broken_connections_leaves_others_their_answers():
    async with serving(max_connections=1500, header_timeout_s=0.5) as client:
        idle = [await asyncio.open_connection("127.0.0.1", client.port) for _ in range(400)]

        async def storm():
            for number in range(200):
                async with client.raw(CHAT, HI | {"stream": True}) as request:
                    if number % 2:
                        await request.until(b"\r\n")
                    request.abort()

        storming = asyncio.ensure_future(storm())
        for _ in range(50):
            answer = await client.chat(stream=True)
            assert answer.events[-1] == "[DONE]"
        await storming
        for _, writer in idle:
            writer.close()
        await asyncio.sleep(0.1)


async def test_broken_requests_leave_no_tracebacks_in_the_log(caplog):
    async with serving() as client:
        for data in (HEAD + b"X" * 9000 + b": a\r\n\r\n", b"\x00\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(data)
            await closed(reader)
            writer.close()
    assert not [record for record in caplog.records if record.exc_info]


async def test_connections_are_accepted_one_a_turn_of_the_loop():
    """A storm waits in the kernel, not in one turn that holds all streams up."""
    made = []

    def new_protocol():
        made.append(1)
        return asyncio.Protocol()

    listener = await listen(new_protocol, "127.0.0.1", 0)
    sockets = [socket.socket() for _ in range(50)]
    for found in sockets:  # blocking: the loop does not turn meanwhile
        found.connect(("127.0.0.1", listener.port))
    counts = []
    for _ in range(500):
        await asyncio.sleep(0)
        counts.append(len(made))
    await listener.close()
    for found in sockets:
        found.close()
    await asyncio.sleep(0.01)
    assert counts[-1] == 50
    assert max(after - earlier for earlier, after in itertools.pairwise(counts)) == 1
