"""Fairness: what a long prompt does to a running stream and to a short request behind it.

    python -m benchmarks.fairness --url http://127.0.0.1:8080 --model default_model

A stream runs; a long prompt (about 1,600 tokens) arrives; a moment later a short request. Reported:
the longest pause of the running stream while the long prompt is prefilled, and the first token of
the short and of the long request. If the running stream ends too early the result is not `valid`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from .http_stream import Exchange, Target, add_target_arguments, connect
from .prompts import PATHS, request_body, words
from .sse import StreamRecord, decode

COUNTING = ", ".join(str(number) for number in range(1, 40)) + ","
"""Greedy decoding of a real model goes on counting, so the running stream does not end early."""


@dataclass(frozen=True, slots=True)
class FairnessPlan:
    """Sizes of the requests and when they are sent."""

    long_words: int = 1600
    long_prompts: int = 1
    short_words: int = 12
    running_tokens: int = 1200
    settled_arrivals: int = 12
    """Arrivals of the running stream before the long prompt is sent."""
    lead_s: float = 0.2
    """Seconds between the long prompt and the short request."""
    salt: str = "0"
    timeout_s: float = 180.0


@dataclass(slots=True)
class FairnessResult:
    """Seconds; None where the request never got a token. Of several long prompts, the last one's first token."""

    running_longest_gap_s: float
    running_usual_gap_s: float | None
    short_first_token_s: float | None
    long_first_token_s: float | None
    long_prompt_tokens: int | None
    valid: bool
    errors: list[str]
    long_first_tokens_s: list[float] = field(default_factory=list)


async def run_fairness(target: Target, plan: FairnessPlan) -> FairnessResult:
    """Run the requests. Raises OSError or TimeoutError if the running stream does not start."""
    running, short, *longs = [await connect(target) for _ in range(2 + plan.long_prompts)]
    running.send(_request(target, f"({plan.salt}) {COUNTING}", plan.running_tokens))
    await running.arrived(plan.settled_arrivals, plan.timeout_s)
    for number, long in enumerate(longs):
        long.send(_request(target, words(plan.long_words, f"{number}{plan.salt}-long"), 4))
    await asyncio.sleep(plan.lead_s)
    short.send(_request(target, words(plan.short_words, f"{plan.salt}-short"), 8))
    async with asyncio.TaskGroup() as group:
        for long in longs:
            group.create_task(long.finished(plan.timeout_s))
        group.create_task(short.finished(plan.timeout_s))
    if not running.ended:
        # One more arrival closes a gap that may still be open.
        await running.arrived(len(running.arrivals) + 1, plan.timeout_s)
    return _summarise(running, longs, short)


def _request(target: Target, prompt: str, max_tokens: int) -> bytes:
    body = request_body("completions", prompt, max_tokens, {"temperature": 0.0, "ignore_eos": True})
    return target.request(PATHS["completions"], body)


def _summarise(running: Exchange, longs: list[Exchange], short: Exchange) -> FairnessResult:
    still_running = not running.ended
    running.close()
    stream, small, *bigs = [decode(exchange) for exchange in (running, short, *longs)]
    if still_running:
        stream.error = None
    bigs.sort(key=_first_text_s)
    begin_s = min(big.sent_s for big in bigs)
    end_s = max(map(_first_text_s, (small, *bigs)))
    before = sorted(_gaps_before(stream, begin_s))
    return FairnessResult(
        running_longest_gap_s=round(stream.longest_gap_s(begin_s, end_s), 4),
        running_usual_gap_s=round(before[len(before) // 2], 4) if before else None,
        short_first_token_s=small.first_token_s,
        long_first_token_s=bigs[-1].first_token_s,
        long_prompt_tokens=bigs[-1].prompt_tokens,
        valid=still_running or stream.end_s >= end_s,
        errors=[record.error for record in (stream, small, *bigs) if record.error],
        long_first_tokens_s=[big.first_token_s for big in bigs if big.first_token_s is not None],
    )


def _first_text_s(record: StreamRecord) -> float:
    return record.text_times_s[0] if record.text_times_s else record.end_s


def _gaps_before(record: StreamRecord, end_s: float) -> list[float]:
    times = [time_s for time_s in record.text_times_s if time_s <= end_s]
    return [after - before for before, after in pairwise(times)]


def main() -> int:
    """Command line; exit status 1 if the figures are not valid."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fairness", description="Measure fairness.")
    add_target_arguments(parser)
    parser.add_argument("--salt", default=str(time.time_ns()), help="opens every prompt")
    parser.add_argument("--long-words", type=int, default=FairnessPlan().long_words, help="of the long prompt")
    options = parser.parse_args()
    plan = FairnessPlan(long_words=options.long_words, salt=options.salt)
    result = asyncio.run(run_fairness(Target.from_options(options), plan))
    print(json.dumps(asdict(result), indent=1))
    return 0 if result.valid and not result.errors else 1


if __name__ == "__main__":
    sys.exit(main())
