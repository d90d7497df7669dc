"""Many clients at once, some of whom leave: nothing of them stays."""

import asyncio
import random

from mlx_troupe.runtime.events import Finished, PrefillProgress, TextDelta, Usage

from .fake_service import FakeService
from .serving import CHAT, COMPLETIONS, HI, Client, serving

CLIENTS = 32
ROUNDS = 8


def script(generation):
    script = [PrefillProgress(1, 2)]
    for token in range(20):
        script += [TextDelta(f" {token}", (token,), None, index) for index in range(generation.n)]
    return [*script, *(Finished("length", Usage(2, 0, 20), index=index) for index in range(generation.n))]


async def visit(client: Client, chance: random.Random) -> None:
    path = chance.choice([CHAT, COMPLETIONS])
    body = HI if path == CHAT else {"prompt": ["a", "b"]}
    async with client.raw(path, body | {"stream": chance.random() < 0.7, "n": chance.randint(1, 3)}) as request:
        match chance.randrange(4):
            case 0:
                request.abort()
            case 1:
                await request.reader.read(chance.randint(1, 4000))
            case _:
                while data := await request.reader.read(1 << 16):
                    if data.endswith((b"0\r\n\r\n", b"}}}")):
                        break


async def test_nothing_stays_of_those_who_leave():
    async with serving(FakeService(script)) as client:
        for number in range(ROUNDS):
            chance = random.Random(number)
            async with asyncio.TaskGroup() as group:
                for _ in range(CLIENTS):
                    group.create_task(visit(client, random.Random(chance.random())))
        await client.service.until(lambda: not client.service.active)
        while await client.metric("mlx_troupe_http_requests_in_progress") != 1:
            pass
        assert (await client.chat()).status == 200
