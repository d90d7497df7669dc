"""CPU of the streaming handler a token, by hand: `python -m tests.api.measure_sse [streams] [tokens]`.

The server is fed at full speed, one token a stream a step, and read by another process over real sockets. Printed is
the server process's CPU time a token, and for comparison that of the same mailboxes read by plain tasks.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mlx_troupe.api.server import listening
from mlx_troupe.api.settings import ServerSettings
from mlx_troupe.runtime.event_stream import EventStream
from mlx_troupe.runtime.events import Finished, TextDelta, Usage
from mlx_troupe.runtime.generation import Generation

from .fake_service import FakeService

BODY = b'{"messages":[{"role":"user","content":"hi"}],"stream":true}'
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


class MailboxService(FakeService):
    """Hands out real mailboxes, which `steps` fills."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes: list[EventStream] = []
        self._arrived = asyncio.Condition()

    @asynccontextmanager
    async def stream(self, generation: Generation) -> AsyncIterator[EventStream]:
        box = EventStream()
        async with self._arrived:
            self.boxes.append(box)
            self._arrived.notify_all()
        yield box

    async def submitted_all(self, streams: int) -> None:
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.boxes) == streams)

    async def steps(self, tokens: int) -> None:
        for token in range(tokens):
            delta = TextDelta(" token", (token,))
            for box in self.boxes:
                box.push(delta)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        for box in self.boxes:
            box.push(Finished("length", Usage(4, 0, tokens)))


async def read_all(port: int, streams: int) -> None:
    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD % len(BODY) + BODY)
        while not (await reader.read(1 << 16)).endswith(b"0\r\n\r\n"):
            pass
        writer.close()

    await asyncio.gather(*(one() for _ in range(streams)))


async def over_http(streams: int, tokens: int) -> float:
    service = MailboxService()
    async with listening(service, ServerSettings(port=0, access_log=False)) as url:
        port = url.rpartition(":")[2]
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.api.measure_sse", "read", port, str(streams)
        )
        await service.submitted_all(streams)
        started = time.process_time()
        await service.steps(tokens)
        await client.wait()
        return time.process_time() - started


async def plain(streams: int, tokens: int) -> float:
    service = MailboxService()
    service.boxes = [EventStream() for _ in range(streams)]

    async def read(box: EventStream) -> None:
        while await box.take():
            pass

    started = time.process_time()
    async with asyncio.TaskGroup() as group:
        for box in service.boxes:
            group.create_task(read(box))
        await service.steps(tokens)
    return time.process_time() - started


def main() -> None:
    if sys.argv[1:2] == ["read"]:
        asyncio.run(read_all(int(sys.argv[2]), int(sys.argv[3])))
        return
    streams, tokens = (int(value) for value in (sys.argv[1:] + ["32", "2000"][len(sys.argv) - 1 :]))
    for name, run in (("plain tasks", plain), ("over HTTP", over_http)):
        seconds = min(asyncio.run(run(streams, tokens)) for _ in range(3))
        print(f"{name}: {seconds / streams / tokens * 1e6:.2f} us a token")


if __name__ == "__main__":
    main()
