"""Small parts the tests of the actors share."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

from mlx_troupe.runtime.event_stream import EventStream
from mlx_troupe.runtime.events import Event, Failed, Finished, TextDelta
from mlx_troupe.runtime.request import Request
from mlx_troupe.runtime.sampling_params import SamplingParams
from tests.fake_engine import oracle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUMBERS = itertools.count(1)


class FakeText:
    """A TextStream whose tokens read "<7>", with stop strings matched on the joined text and held back."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stopped: str | None = None
        self.tokens: list[int] = []
        self._stop = stop
        self._held = ""

    def add(self, token: int) -> str:
        """The text that may be sent."""
        assert self.stopped is None, "a token came after the stop"
        self.tokens.append(token)
        self._held += f"<{token}>"
        for stop in self._stop:
            if (at := self._held.find(stop)) >= 0:
                text, self._held, self.stopped = self._held[:at], "", stop
                return text
        keep = max(map(len, self._stop), default=1) - 1
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def finish(self) -> str:
        """What was held back."""
        text, self._held = self._held, ""
        return text


def make_rows(
    prompt: Sequence[int],
    max_tokens: int = 4,
    *,
    n: int = 1,
    stop: Sequence[str] = (),
    arrived_s: float = 0.0,
    request_id: str = "",
    seed: int = 0,
    sampling: SamplingParams | None = None,
    **more: Any,
) -> tuple[Request, ...]:
    """Rows of one request; choice i has seed + i."""
    numbers = [next(NUMBERS) for _ in range(n)]
    events = EventStream(choices=n)
    return tuple(
        Request(
            row=number,
            request_id=request_id or f"r{numbers[0]}",
            prompt=list(prompt),
            sampling=sampling or SamplingParams(seed=seed + index),
            max_tokens=max_tokens,
            text=FakeText(stop),  # type: ignore[arg-type]
            events=events,
            arrived_s=arrived_s,
            index=index,
            leader=numbers[0],
            **more,
        )
        for index, number in enumerate(numbers)
    )


def make_row(prompt: Sequence[int], max_tokens: int = 4, **more: Any) -> Request:
    """A request of one row."""
    return make_rows(prompt, max_tokens, **more)[0]


def expected(request: Request, *, vocab_size: int = 64) -> list[int]:
    """What the oracle says the row gives when nothing stops it early."""
    return oracle(
        request.prompt,
        request.max_tokens,
        seed=request.sampling.seed or 0,
        vocab_size=vocab_size,
        stop_tokens=request.stop_tokens,
        min_tokens=request.min_tokens,
    )


def waiting_events(request: Request) -> list[Event]:
    """The events pushed and not taken yet, without taking them."""
    return list(request.events._events)


def endings(request: Request) -> list[Finished | Failed]:
    """The final events of one row."""
    return [
        event
        for event in waiting_events(request)
        if isinstance(event, Finished | Failed) and event.index == request.index
    ]


def text_of(request: Request) -> str:
    """All text of one row."""
    return "".join(
        event.text for event in waiting_events(request) if isinstance(event, TextDelta) and event.index == request.index
    )


class InlineThread:
    """A JobThread that runs its jobs on the loop, in order, one a turn of the loop."""

    def __init__(self) -> None:
        self.jobs = 0

    def submit(self, job: Callable[[], None]) -> None:
        """Run the job soon."""
        self.jobs += 1
        asyncio.get_running_loop().call_soon(self._run, job)

    def _run(self, job: Callable[[], None]) -> None:
        job()
        self.jobs -= 1


class HeldThread:
    """A JobThread that runs nothing until told to."""

    def __init__(self) -> None:
        self.held: list[Callable[[], None]] = []

    def submit(self, job: Callable[[], None]) -> None:
        """Keep the job."""
        self.held.append(job)

    def run(self, count: int = 1) -> None:
        """Run the oldest jobs now."""
        for _ in range(count):
            self.held.pop(0)()
