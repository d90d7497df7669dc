"""An event loop whose clock jumps to the next timer instead of waiting, and a target that takes its time on it."""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, TypeVar

from benchmarks.sse import StreamRecord
from benchmarks.targets.local import LocalAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from benchmarks.targets.ask import Ask

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only while everybody waits, and then at once."""

    def __init__(self) -> None:
        self.now_s = 100.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now_s


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None):
        if timeout is not None and timeout > 0:
            self._loop.now_s += timeout
        return super().select(0)


def run(coroutine: Coroutine[object, object, T]) -> T:
    """Run to the end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


class ScriptedTarget:
    """Answers one token; how long the k-th request takes is the script's to say.

    Args:
        takes_s: seconds of a request by its number.
        serial: one request at a time, first come, first served.
    """

    name = "scripted"
    in_process = True

    def __init__(self, takes_s: Callable[[int], float], *, serial: bool = False, text: str = "word") -> None:
        self.asks: list[Ask] = []
        self.asked_s: list[float] = []
        self.open = self.most_open = 0
        self._takes_s = takes_s
        self._text = text
        self._turn = asyncio.Semaphore(1 if serial else 1_000_000)

    async def prepare(self, connections: int) -> None:
        pass

    async def ask(self, ask: Ask) -> LocalAnswer:
        loop = asyncio.get_running_loop()
        number = len(self.asks)
        self.asks.append(ask)
        self.asked_s.append(loop.time())
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        record = StreamRecord(loop.time(), 0.0)
        async with self._turn:
            await asyncio.sleep(self._takes_s(number))
        self.open -= 1
        record.text_times_s = [loop.time()]
        record.text, record.usage_tokens, record.finish_reason = self._text, 1, "stop"
        record.end_s = loop.time()
        return LocalAnswer(record, left=False)

    def received(self) -> int:
        return len(self.asks)

    async def scrape(self) -> dict[str, float]:
        return {}
