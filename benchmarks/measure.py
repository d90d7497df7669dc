"""One measured repeat: warm-up, load, metrics scraped along, figures."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from .figures.objective import Objective
from .figures.outcome import Outcome
from .figures.summary import Figures, Sample, summarise
from .prompts import words
from .targets.ask import Ask
from .traffic.arrivals import Level
from .traffic.conversations import Workload, conversations
from .traffic.drive import Driver, DriveSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from .prompts import Endpoint
    from .targets.ask import Target
    from .traffic.drive import Tally

    Watch = Callable[[Target, Level, int, Tally], None]

LEAST_WARM_UPS = 4
CALIBRATION_WORDS = (64, 192)


class BenchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is run, and judged by.

    Attributes:
        levels: of load, in order.
        workload: what is asked.
        drive: how it is sent.
        warm_up: conversations sent and forgotten before the first repeat of a level; None is one a user, four at least.
        repeats: measured, of each level.
        objective: of goodput.
        scrape_s: interval between looks at the server's metrics; 0 is none.
        salt: keeps this run's text apart from an earlier one's on the same server.
    """

    levels: tuple[Level, ...]
    workload: Workload = Workload()
    drive: DriveSettings = DriveSettings()
    warm_up: int | None = None
    repeats: int = 3
    objective: Objective = Objective()
    scrape_s: float = 1.0
    salt: str = "0"


class Measurement(msgspec.Struct, frozen=True):
    """One repeat of one level on one target."""

    target: str
    level: Level
    repeat: int
    figures: Figures
    outcomes: tuple[Outcome, ...]
    samples: tuple[Sample, ...]


async def measure(
    target: Target, plan: BenchPlan, level: Level, repeat: int, watch: Watch | None = None
) -> Measurement:
    """Run one repeat; repeat -1 is the warm-up. Raises RuntimeError when a server cannot be reached at all."""
    warm_up = repeat < 0
    drive = plan.drive
    if warm_up:
        count = warm_ups(plan, level)
        level = Level("warm-up", users=min(count, max(1, level.users)))
        drive = msgspec.structs.replace(drive, conversations=count, duration_s=None)
    try:
        await target.prepare(level.users)
    except OSError as error:
        raise RuntimeError(f"{target.name} cannot be reached: {error}") from error
    driver = Driver(target, drive)
    told = conversations(plan.workload, level, f"{plan.salt}-{level.label}-{repeat}")
    async with _scraping(target, driver, 0.0 if warm_up else plan.scrape_s) as samples:
        if watch is not None:
            watch(target, level, repeat, driver.tally)
        wall_s = await driver.run(level, told)
    outcomes = driver.tally.outcomes(driver.begin_s)
    figures = summarise(outcomes, plan.objective, samples, wall_s=wall_s)
    return Measurement(target.name, level, repeat, figures, tuple(outcomes), tuple(samples))


def warm_ups(plan: BenchPlan, level: Level) -> int:
    """How many conversations warm a level up."""
    return max(LEAST_WARM_UPS, level.users) if plan.warm_up is None else plan.warm_up


@asynccontextmanager
async def _scraping(target: Target, driver: Driver, interval_s: float) -> AsyncIterator[list[Sample]]:
    """Look at the target's metrics before, every `interval_s` during, and after the block."""
    samples: list[Sample] = []
    if interval_s <= 0:
        yield samples
        return
    loop = asyncio.get_running_loop()
    before, before_s = await target.scrape(), loop.time()

    async def look() -> None:
        samples.append(Sample(round(loop.time() - driver.begin_s, 4), await target.scrape()))

    async def look_often() -> None:
        while True:
            await asyncio.sleep(interval_s)
            await look()

    looking = asyncio.create_task(look_often())
    try:
        yield samples
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    samples.insert(0, Sample(min(0.0, round(before_s - driver.begin_s, 4)), before))
    await look()
    if not any(sample.values for sample in samples):
        samples.clear()


async def tokens_per_word(target: Target, endpoint: Endpoint, timeout_s: float) -> float | None:
    """How many tokens the target's tokenizer makes of a word of the made-up text.

    Two prompts of different length are sent, so that the chat template does not count. None when it sends no usage.
    """
    counts = []
    for count in CALIBRATION_WORDS:
        message = {"role": "user", "content": words(count, "calibration")}
        answer = await target.ask(Ask((message,), 1, {"temperature": 0.0}, None, endpoint, timeout_s))
        counts.append(answer.record().prompt_tokens)
    if None in counts:
        return None
    low, high = (count or 0 for count in counts)
    return (high - low) / (CALIBRATION_WORDS[1] - CALIBRATION_WORDS[0]) or None
