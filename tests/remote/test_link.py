"""Frames on a real socket: any split, one write a turn, and no mercy for a peer that breaks the rules."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from mlx_troupe.runtime.remote import child
from mlx_troupe.runtime.remote.link import HEADER_BYTES, FrameTooLarge, Link, frame_of
from mlx_troupe.runtime.remote.to_engine import Cancel, ToEngine


class End:
    """One end of a pair, and what it heard."""

    def __init__(self, limit_bytes: int) -> None:
        self.heard: list[ToEngine] = []
        self.reasons: list[str] = []
        self.more: list[bytearray] = []
        self.link = Link(
            msgspec.msgpack.Decoder(ToEngine), self.hear, self.reasons.append, self.gather, limit_bytes=limit_bytes
        )

    def hear(self, message: ToEngine) -> None:
        if message == Cancel("unbearable"):
            raise ArithmeticError("no")
        self.heard.append(message)

    def gather(self) -> list[bytearray]:
        more, self.more = self.more, []
        return more


@asynccontextmanager
async def linked(limit_bytes: int = 1 << 20):
    """An End, and the bare socket at the other."""
    ours, theirs = socket.socketpair()
    for one in (ours, theirs):
        one.setblocking(False)
    end = End(limit_bytes)
    await asyncio.get_running_loop().create_unix_connection(lambda: end.link, sock=ours)
    try:
        yield end, theirs
    finally:
        theirs.close()
        end.link.abort("the test is over")
        await end.link.closed.wait()


async def say(theirs: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(theirs, data)
    for _ in range(3):
        await asyncio.sleep(0)


MESSAGES = [Cancel("a"), Cancel("b" * 100_000), Cancel("c")]


@pytest.mark.parametrize("size", [1, 3, 1000, 10**6])
async def test_messages_arrive_however_they_are_split(size) -> None:
    data = b"".join(map(frame_of, MESSAGES))
    if size < 10:  # the long one a byte at a time says nothing more
        data, expected = b"".join(map(frame_of, MESSAGES[::2])), MESSAGES[::2]
    else:
        expected = MESSAGES
    async with linked() as (end, theirs):
        for start in range(0, len(data), size):
            await say(theirs, data[start : start + size])
        async with asyncio.timeout(5):
            while len(end.heard) < len(expected):  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert end.heard == expected


@pytest.mark.parametrize(
    "data",
    [
        (2**32 - 1).to_bytes(HEADER_BYTES, "big"),
        (1 << 21).to_bytes(HEADER_BYTES, "big") + b"x",
        (4).to_bytes(HEADER_BYTES, "big") + b"\xc1\xc1\xc1\xc1",
        (0).to_bytes(HEADER_BYTES, "big"),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3,
        bytes(frame_of({"type": "Launch", "missiles": 3})),
        bytes(frame_of({"type": "Cancel", "request_id": 7})),
        bytes(frame_of([[[[]]]] * 1000)),
        len(b"\x91" * 100_000).to_bytes(HEADER_BYTES, "big") + b"\x91" * 100_000,
        bytes(frame_of(Cancel("unbearable"))),
    ],
)
async def test_a_peer_that_breaks_the_rules_is_cut_off(data) -> None:
    async with linked() as (end, theirs):
        await say(theirs, bytes(frame_of(Cancel("fine"))) + data)
        async with asyncio.timeout(5):
            await end.link.closed.wait()
        assert end.heard == [Cancel("fine")]
        assert len(end.reasons) == 1
        assert end.reasons[0]


async def test_random_bytes_never_hang_or_raise() -> None:
    for seed in range(40):
        async with linked() as (end, theirs):
            await say(theirs, bytes((seed * 7 + place * place) % 256 for place in range(seed * 5)))
            theirs.close()
            async with asyncio.timeout(5):
                await end.link.closed.wait()
        assert len(end.reasons) == 1


async def test_too_large_a_message_is_refused_to_its_sender_alone() -> None:
    async with linked() as (end, theirs):
        with pytest.raises(FrameTooLarge):
            end.link.send(Cancel("x" * (1 << 21)))
        with pytest.raises(UnicodeEncodeError):
            end.link.send(Cancel("\ud800"))
        end.link.send(Cancel("fine"))
        assert await asyncio.get_running_loop().sock_recv(theirs, 1 << 20) == bytes(frame_of(Cancel("fine")))


async def test_what_is_said_in_one_turn_is_one_write() -> None:
    async with linked() as (end, _):
        writes: list[bytes] = []
        transport = end.link._transport
        end.link._transport = type(
            "Counting",
            (),
            {"write": lambda _, data: writes.append(bytes(data)), "is_closing": lambda _: False},
        )()
        for number in range(20):
            end.link.send(Cancel(str(number)))
        end.more = [frame_of(Cancel("gathered"))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        end.link._transport = transport
        assert len(writes) == 1
        assert writes[0].count(b"Cancel") == 21


async def test_nothing_is_gathered_for_a_slow_peer() -> None:
    async with linked(limit_bytes=1 << 28) as (end, theirs):
        end.link.send(Cancel("x" * (8 << 20)))
        async with asyncio.timeout(5):
            while not end.link.paused:  # noqa: ASYNC110
                await asyncio.sleep(0)
        end.more = [frame_of(Cancel("later"))]
        end.link.schedule()
        await asyncio.sleep(0.01)
        assert end.more
        assert end.link.unsent_bytes > 1 << 20
        received = 0
        async with asyncio.timeout(10):
            while end.more or end.link.unsent_bytes:
                received += len(await asyncio.get_running_loop().sock_recv(theirs, 1 << 20))
        assert received > 0


def test_the_socket_is_private_and_gone_at_once(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(child.tempfile, "tempdir", str(tmp_path))
    seen = []
    connect = socket.socket.connect

    class Looking(socket.socket):
        def connect(self, address: str) -> None:
            path = Path(address)
            seen.extend(stat.S_IMODE(os.stat(one).st_mode) for one in (path, path.parent))
            connect(self, address)

    monkeypatch.setattr(child.socket, "socket", Looking)
    listener, connection = child.connected_pair()
    accepted, _ = listener.accept()
    accepted.sendall(b"hello")
    assert connection.recv(5) == b"hello"
    assert seen == [0o600, 0o700]
    assert list(tmp_path.iterdir()) == []
    for one in (accepted, listener, connection):
        one.close()
