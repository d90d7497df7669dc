"""A server whose streams have a steady pace, and a reader that measures it; each a process of its own.

`python -m tests.api.paced_server serve` prints its port; `... read PORT STREAMS SECONDS` prints the gaps it saw, in
seconds, as a JSON list.
"""

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mlx_troupe.api.server import listening
from mlx_troupe.api.settings import ServerSettings
from mlx_troupe.runtime.events import Event, TextDelta
from mlx_troupe.runtime.generation import Generation

from .fake_service import FakeService, FakeSource
from .measure_sse import BODY, HEAD

PACE_S = 0.025
"""A token: what a model of some size takes on a laptop."""


class PacedSource(FakeSource):
    """A token every PACE_S, for ever."""

    async def take(self) -> list[Event]:
        loop = asyncio.get_running_loop()
        now = loop.time()
        await asyncio.sleep(PACE_S - now % PACE_S)
        return [TextDelta(" token", (1,))]


class PacedService(FakeService):
    @asynccontextmanager
    async def stream(self, generation: Generation) -> AsyncIterator[FakeSource]:
        yield PacedSource(generation, [])


async def serve() -> None:
    settings = ServerSettings(port=0, access_log=False, header_timeout_s=5, body_timeout_s=5)
    async with listening(PacedService(), settings) as url:
        gc.collect()
        gc.freeze()  # as `api.server.serve` does
        print(url.rpartition(":")[2], flush=True)
        await asyncio.Event().wait()


async def read(port: int, streams: int, seconds: float) -> list[float]:
    """Gaps between the data of each stream."""
    gaps: list[float] = []

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD % len(BODY) + BODY)
        await reader.readuntil(b"token")
        last = time.perf_counter()
        while last < ends:
            await reader.readuntil(b"token")
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
        writer.close()

    ends = time.perf_counter() + seconds
    await asyncio.gather(*(one() for _ in range(streams)))
    return gaps


def keep_to(place: int) -> None:
    """Run on one processor, as if on a machine of its own; wherever it pleases where that cannot be had."""
    if hasattr(os, "sched_setaffinity"):
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[place % len(processors)]})


if __name__ == "__main__":
    keep_to(0 if sys.argv[1] == "serve" else 1)
    if sys.argv[1] == "serve":
        asyncio.run(serve())
    else:
        print(json.dumps(asyncio.run(read(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))))
