"""From the command line's words to a plan. Every fault is a ValueError that names the option."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from .figures.objective import Objective, parse_objective
from .file_limit import most_connections
from .measure import BenchPlan
from .traffic.arrivals import closed_levels, open_levels
from .traffic.conversations import Workload
from .traffic.drive import MOST_OPEN, DriveSettings
from .traffic.lengths import parse_lengths
from .traffic.recorded import RecordedRequest, read_requests
from .traffic.sampling_mix import parse_mix

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from .traffic.arrivals import Level

T = TypeVar("T")

REQUESTS_PER_USER = 4
LEAST_REQUESTS = 16


def plan_of(arguments: argparse.Namespace, *, tokens_per_word: float = 1.0) -> BenchPlan:
    """The plan that the load's options describe. Raises ValueError naming the option.

    `tokens_per_word` is what was measured; --tokens-per-word stands above it.
    """
    if arguments.tokens_per_word is not None:
        tokens_per_word = arguments.tokens_per_word
        if not 0.01 <= tokens_per_word <= 100:
            raise ValueError(f"--tokens-per-word is between 0.01 and 100, not {tokens_per_word:g}")
    recorded = () if arguments.requests_file is None else _recorded(arguments.requests_file)
    levels = _levels(arguments, recorded)
    workload = Workload(
        prompt=_option("--prompt-lengths", parse_lengths, arguments.prompt_lengths),
        output=_option("--output-lengths", parse_lengths, arguments.output_lengths),
        sampling=_option("--sampling", parse_mix, arguments.sampling),
        prefix_tokens=_at_least("--prefix-tokens", arguments.prefix_tokens, 0),
        prefix_groups=_at_least("--prefix-groups", arguments.prefix_groups, 1),
        turns=_at_least("--turns", arguments.turns, 1),
        leave_rate=_share("--leave-rate", arguments.leave_rate),
        honour_eos=arguments.honour_eos,
        recorded=recorded,
        tokens_per_word=tokens_per_word,
        seed=arguments.seed,
    )
    drive = DriveSettings(
        conversations=_conversations(arguments, levels, recorded),
        duration_s=_seconds("--duration", arguments.duration),
        think_s=_seconds("--think", arguments.think, zero=True) or 0.0,
        endpoint=arguments.endpoint,
        timeout_s=_seconds("--request-timeout", arguments.request_timeout) or DriveSettings().timeout_s,
        max_open=min(MOST_OPEN, most_connections()),
    )
    return BenchPlan(
        levels=tuple(levels),
        workload=workload,
        drive=drive,
        warm_up=None if arguments.warm_up is None else _at_least("--warm-up", arguments.warm_up, 0),
        repeats=_at_least("--repeats", arguments.repeats, 1),
        objective=_option("--objective", parse_objective, arguments.objective) if arguments.objective else Objective(),
        scrape_s=_seconds("--scrape-interval", arguments.scrape_interval, zero=True) or 0.0,
        salt=arguments.salt or f"{time.time_ns():x}",
    )


def _levels(arguments: argparse.Namespace, recorded: tuple[RecordedRequest, ...]) -> list[Level]:
    if arguments.users is not None and arguments.arrivals is not None:
        raise ValueError("--users is a closed loop and --arrivals an open one: give one of them")
    if arguments.arrivals is None:
        return _option("--users", closed_levels, arguments.users or "8")
    times_s = [one.at_s for one in recorded if one.at_s is not None]
    if arguments.arrivals.startswith("replay") and not times_s:
        raise ValueError("--arrivals replay needs --requests-file, with at_s or timestamp in every line")
    return _option("--arrivals", lambda text: open_levels(text, times_s), arguments.arrivals)


def _conversations(
    arguments: argparse.Namespace, levels: list[Level], recorded: tuple[RecordedRequest, ...]
) -> int | None:
    """How many conversations a repeat has: as told, else the whole trace, else enough for every user."""
    if arguments.requests is not None:
        return _at_least("--requests", arguments.requests, 1)
    if arguments.duration is not None:
        return None
    if arguments.arrivals is not None and arguments.arrivals.startswith("replay"):
        return len(recorded)
    return max(LEAST_REQUESTS, REQUESTS_PER_USER * max(level.users for level in levels))


def _recorded(name: str) -> tuple[RecordedRequest, ...]:
    try:
        return tuple(read_requests(Path(name)))
    except (OSError, ValueError) as error:
        raise ValueError(f"--requests-file: {error}") from None


def _option(flag: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def _at_least(flag: str, value: int, least: int) -> int:
    if value < least:
        raise ValueError(f"{flag} is at least {least}, not {value}")
    return value


def _seconds(flag: str, value: float | None, *, zero: bool = False) -> float | None:
    if value is not None and not (0 < value < math.inf or (zero and value == 0)):
        raise ValueError(f"{flag} is a time above 0 s, not {value:g}")
    return value


def _share(flag: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{flag} is a share between 0 and 1, not {value:g}")
    return value
