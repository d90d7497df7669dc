"""When requests are meant to arrive: schedules of an open loop, in seconds from the start of the load.

An open loop sends at these times whatever the server does, and latency counts from them, not from when the client got
round to sending: a server that stalls is charged for everybody who came meanwhile (no coordinated omission).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence


class Schedule(Protocol):
    """An endless or finite sequence of arrival times."""

    def times_s(self, rng: random.Random) -> Iterator[float]:
        """Ascending seconds from the start."""
        ...


class Constant(msgspec.Struct, frozen=True, tag="constant"):
    """One request every 1 / rate seconds."""

    rate_per_s: float

    def times_s(self, rng: random.Random) -> Iterator[float]:
        number = 0
        while True:
            yield number / self.rate_per_s
            number += 1


class Poisson(msgspec.Struct, frozen=True, tag="poisson"):
    """Independent users: gaps between arrivals are exponential with mean 1 / rate."""

    rate_per_s: float

    def times_s(self, rng: random.Random) -> Iterator[float]:
        now_s = 0.0
        while True:
            now_s += rng.expovariate(self.rate_per_s)
            yield now_s


class Bursts(msgspec.Struct, frozen=True, tag="bursts"):
    """`size` requests at once, every `period_s` seconds."""

    size: int
    period_s: float

    def times_s(self, rng: random.Random) -> Iterator[float]:
        burst = 0
        while True:
            for _ in range(self.size):
                yield burst * self.period_s
            burst += 1


class Replay(msgspec.Struct, frozen=True, tag="replay"):
    """Recorded arrival times; `speed` 2 plays them twice as fast."""

    recorded_s: tuple[float, ...]
    speed: float = 1.0

    def times_s(self, rng: random.Random) -> Iterator[float]:
        for at_s in self.recorded_s:
            yield at_s / self.speed


AnySchedule = Constant | Poisson | Bursts | Replay


class Level(msgspec.Struct, frozen=True):
    """One point of load: so many users in a closed loop, or a schedule in an open one.

    Attributes:
        label: how reports name it.
        users: of a closed loop; 0 is an open loop.
        schedule: of an open loop.
    """

    label: str
    users: int = 0
    schedule: AnySchedule | None = None

    @property
    def offered(self) -> float:
        """The load as one number: users of a closed loop, requests a second of an open one, speed of a replay."""
        match self.schedule:
            case None:
                return float(self.users)
            case Constant() | Poisson():
                return self.schedule.rate_per_s
            case Bursts():
                return self.schedule.size / self.schedule.period_s
            case Replay():
                return self.schedule.speed

    @property
    def offered_unit(self) -> str:
        """What `offered` counts."""
        if self.schedule is None:
            return "users"
        return "times the recorded speed" if isinstance(self.schedule, Replay) else "requests a second offered"


def closed_levels(text: str) -> list[Level]:
    """Levels of "8" or "1,4,16" users. Raises ValueError."""
    levels = []
    for part in text.split(","):
        users = int(part)
        if users < 1:
            raise ValueError(f"a closed loop needs at least one user, not {part}")
        levels.append(Level(f"{users} users", users=users))
    return levels


def open_levels(text: str, recorded_s: Sequence[float] = ()) -> list[Level]:
    """Levels of "poisson:2,4", "constant:8", "bursts:16/10" (16 every 10 s) or "replay", "replay:2" (twice as fast).

    `recorded_s` are the arrival times of a replay. Raises ValueError.
    """
    kind, _, values = text.partition(":")
    if kind == "replay":
        if not recorded_s:
            raise ValueError("a replay needs --trace-requests, the recorded requests")
        speeds = [_positive(part) for part in (values or "1").split(",")]
        return [Level(f"replay x{speed:g}", schedule=Replay(tuple(recorded_s), speed)) for speed in speeds]
    if not values:
        raise ValueError(f"{text!r} is not poisson:RATE, constant:RATE, bursts:SIZE/SECONDS or replay[:SPEED]")
    return [_open_level(kind, part) for part in values.split(",")]


def _open_level(kind: str, value: str) -> Level:
    match kind:
        case "poisson":
            return Level(f"poisson {value}/s", schedule=Poisson(_positive(value)))
        case "constant":
            return Level(f"constant {value}/s", schedule=Constant(_positive(value)))
        case "bursts":
            size, separator, period_s = value.partition("/")
            if not separator:
                raise ValueError(f"bursts are SIZE/SECONDS, such as bursts:16/10, not {value!r}")
            return Level(f"bursts of {size} every {period_s} s", schedule=Bursts(_whole(size), _positive(period_s)))
    raise ValueError(f"unknown arrivals {kind!r}; known: poisson, constant, bursts, replay")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(f"{text} is not a positive number")
    return value


def _whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"{text} is not a whole number above zero")
    return value
