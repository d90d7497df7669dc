"""`mlx-troupe serve` over a fake service, as a process: `python -m tests.api.run_fake_server MODE [flags]`.

Modes: `ready` loads at once and answers; `hang` answers a word and then nothing; `loading` never loads; `broken` fails
to load; `stubborn` is `hang` with a drain that never ends.
"""

import asyncio
import sys

from mlx_troupe.api.cli import main
from mlx_troupe.runtime.errors import TroupeError
from mlx_troupe.runtime.events import TextDelta

from .fake_service import FakeService, hello


class StubbornService(FakeService):
    async def drain(self, timeout_s: float) -> None:
        print("draining", flush=True)
        await super().drain(1e6)


def make(mode: str) -> FakeService:
    hangs = mode in ("hang", "stubborn")
    kind = StubbornService if mode == "stubborn" else FakeService
    service = kind((lambda _: [TextDelta("Hel", (1,)), asyncio.Event()]) if hangs else hello, loaded=False)
    if mode != "loading":
        service.may_load.set()
    if mode == "broken":
        service.load_error = TroupeError("no such model; try demo")
    return service


if __name__ == "__main__":
    sys.exit(main(["serve", "--port", "0", *sys.argv[2:]], open_runtime=lambda config, progress: make(sys.argv[1])))
