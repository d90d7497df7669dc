"""Readers that fall behind cost bounded memory, and those that stop are cut off."""

import asyncio
import json
import socket

from mlx_troupe.runtime.events import Finished, TextDelta, Usage

from .fake_service import FakeService
from .serving import CHAT, HI, serving

PIECE = "x" * 65_536
PIECES = 400


def script(generation):
    return [*(TextDelta(PIECE, (1,)) for _ in range(PIECES)), Finished("length", Usage())]


async def connect(port: int, *, stream: bool = True) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection with a small receive buffer, and a request on it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    body = json.dumps(HI | {"stream": stream}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


async def test_a_reader_that_stops_is_cut_off():
    async with serving(FakeService(script), write_timeout_s=0.2) as client:
        _, writer = await connect(client.port)
        await client.service.until(lambda: client.service.active)
        source = next(iter(client.service.active.values()))
        await client.service.until(lambda: client.service.cancelled)
        assert source.left > PIECES // 4, "output went on being buffered"
        assert await client.metric('mlx_troupe_http_disconnects_total{stage="unread"}') == 1
        assert await client.metric('mlx_troupe_http_requests_total{route="/v1/chat/completions",status="499"}') == 1
        assert (await client.get("/livez")).status == 200
        writer.close()


async def test_a_reader_that_does_not_take_a_whole_answer_is_cut_off():
    def long(generation):
        return [TextDelta("x" * 20_000_000, (1,)), Finished("length", Usage())]

    async with serving(FakeService(long), write_timeout_s=0.2) as client:
        _, writer = await connect(client.port, stream=False)
        await client.service.until(lambda: client.service.submitted and not client.service.active)
        while await client.metric('mlx_troupe_http_disconnects_total{stage="unread"}') == 0:
            pass
        writer.close()


async def test_a_reader_that_stops_does_not_hold_others_up():
    async with serving(FakeService(script), write_timeout_s=30) as client:
        _, writer = await connect(client.port)
        await client.service.until(lambda: client.service.active)
        answer = await client.chat(stream=True)
        assert len(answer.chunks) == PIECES + 2
        assert len(client.service.active) == 1
        writer.transport.abort()
        await client.service.until(lambda: client.service.cancelled)


async def test_a_slow_reader_gets_everything():
    async with serving(FakeService(script), write_timeout_s=30) as client:
        reader, writer = await connect(client.port)
        received = 0
        tail = b""
        while not tail.endswith(b"\r\n0\r\n\r\n"):
            data = await reader.read(1 << 16)
            received += len(data)
            tail = (tail + data)[-16:]
        assert received > PIECES * len(PIECE)
        writer.close()
        await writer.wait_closed()
        assert client.service.cancelled == []


async def test_keepalives_do_not_pile_up_for_a_reader_that_stops():
    async with serving(FakeService(script), write_timeout_s=0.3, keepalive_interval_s=0.001) as client:
        _, writer = await connect(client.port)
        await client.service.until(lambda: client.service.cancelled)
        writer.close()
