"""Attacks over real sockets leave other clients' streams their pace: p99 of the gaps at most 1.5 times as long.

Server, measuring reader and attackers are three processes; the server has a processor to itself. Both p99s of a ratio
are measured one right after the other.
"""

import asyncio
import json
import sys
from contextlib import asynccontextmanager, suppress

import pytest

from .paced_server import keep_to
from .serving import HI
from .test_attacks import HEAD

STREAMS, SECONDS = 8, 5
TRIES = 3
"""The machine has other things to do; an attack that slows streams down does so every time."""
JSON_HEAD = HEAD + b"Content-Type: application/json\r\n"


@asynccontextmanager
async def server():
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.api.paced_server", "serve", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield int(await process.stdout.readline())
    finally:
        process.kill()
        await process.wait()


async def p99(port: int) -> float:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.api.paced_server", "read", str(port), str(STREAMS), str(SECONDS)),
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    gaps = sorted(json.loads(said))
    assert len(gaps) > STREAMS * SECONDS * 10, "the streams went on"
    return gaps[len(gaps) * 99 // 100]


async def opened(port: int):
    return await asyncio.open_connection("127.0.0.1", port)


async def drip(port: int, start: bytes, pause_s: float = 0.05) -> None:
    """One slow client after the other."""
    while True:
        with suppress(ConnectionError):
            _, writer = await opened(port)
            try:
                writer.write(start)
                while not writer.is_closing():
                    writer.write(b"a")
                    await asyncio.sleep(pause_s)
            finally:
                writer.close()


async def flood(port: int, data: bytes, times: int = 1) -> None:
    """Much at once, again and again; what the server says is read and thrown away."""
    while True:
        with suppress(ConnectionError):
            reader, writer = await opened(port)
            try:
                for _ in range(times):
                    writer.write(data)
                    await writer.drain()
                await reader.read(1000)
            finally:
                writer.close()
        await asyncio.sleep(0.01)


async def idle(port: int) -> None:
    _, writer = await opened(port)
    try:
        await asyncio.Event().wait()
    finally:
        writer.close()


async def leave(port: int) -> None:
    """Ask for a stream and go, at once or after its first bytes."""
    body = json.dumps(HI | {"stream": True}).encode()
    request = JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    while True:
        for waits in (False, True):
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                reader, writer = await opened(port)
                writer.write(request)
                if waits:
                    await reader.readuntil(b"data: ")
                writer.transport.abort()
                writer.close()
            await asyncio.sleep(0.02)


MEGABYTE = b"a" * (1 << 20)
HEADERS = HEAD + b"".join(b"X-%d: a\r\n" % number for number in range(10_000)) + b"\r\n"
ATTACKS = {
    "slow headers": (200, lambda port: drip(port, HEAD + b"X-A: ")),
    "half bodies": (200, lambda port: drip(port, JSON_HEAD + b"Content-Length: 100000\r\n\r\n{")),
    "100 MB bodies": (2, lambda port: flood(port, JSON_HEAD + b"Content-Length: 104857600\r\n\r\n" + MEGABYTE, 100)),
    "100 MB in pieces": (
        2,
        lambda port: flood(port, JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"100000\r\n" + MEGABYTE, 100),
    ),
    "10,000 headers": (4, lambda port: flood(port, HEADERS)),
    "1,000 idle connections": (1000, idle),
    "disconnect storm": (40, leave),
}


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")  # attackers do not clean up
@pytest.mark.parametrize("name", ATTACKS)
async def test_streams_keep_their_pace(name, record_property):
    count, attack = ATTACKS[name]
    keep_to(1)
    ratios = []
    for _ in range(TRIES):
        async with server() as port:
            calm_s = await p99(port)
            attackers = [asyncio.ensure_future(attack(port)) for _ in range(count)]
            await asyncio.sleep(0.5)
            try:
                under_s = await p99(port)
            finally:
                ended = [task.exception() for task in attackers if task.done()]
                for task in attackers:
                    task.cancel()
                await asyncio.gather(*attackers, return_exceptions=True)
            assert not ended, "the attack went on"
        ratios.append(under_s / calm_s)
        print(f"{name}: p99 {calm_s * 1e3:.1f} ms calm, {under_s * 1e3:.1f} ms under attack, {ratios[-1]:.2f}x")
        if ratios[-1] <= 1.5:
            break
    record_property("ratio", min(ratios))
    assert min(ratios) <= 1.5
