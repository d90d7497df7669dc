"""What a long prompt that joins does to rows that run: their longest gap, and how idle the device is between steps.

    python -m benchmarks.joins MODEL --rows 31 --prompt 2048 --joins 6

Streams with mixed sampling run in process; again and again a new prompt of so many tokens is prefilled and joins them.
A gap is the time between two tokens of a stream from the prompt's arrival to its first token and some steps on. The
first joins warm up (kernels are compiled on first use) and do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from mlx_troupe.runtime import Generation, Runtime, SamplingParams

from .stats import percentile
from .trace_summary import device_steps, read_events

WARM_UP = 2
APART_TOKENS = 24
AFTER_S = 0.1


def generation(length: int, tokens: int, seed: int) -> Generation:
    """A request of random ids that shares no prefix with another."""
    rng = random.Random(seed)
    sampling = SamplingParams(
        temperature=(0.6, 0.7, 0.8, 1.0)[seed % 4], top_p=(0.8, 0.9, 0.95, 1.0)[seed % 4], seed=seed
    )
    prompt = tuple(rng.randrange(100, 900) for _ in range(length))
    return Generation(tokens=prompt, sampling=sampling, max_tokens=tokens, ignore_eos=True, cache=False)


class Streams:
    """Running rows and when their tokens came, in seconds."""

    def __init__(self, runtime: Runtime, rows: int) -> None:
        self.times: list[list[float]] = [[] for _ in range(rows)]
        self._runtime = runtime

    async def run(self, row: int, length: int) -> None:
        """Decode until cancelled."""
        async with self._runtime.stream(generation(length, 6000, row)) as events:
            while await events.take():
                self.times[row].append(time.perf_counter())

    async def advance(self, tokens: int) -> None:
        """Until every row has so many more."""
        wanted = [len(times) + tokens for times in self.times]
        while any(len(times) < want for times, want in zip(self.times, wanted, strict=True)):  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    def gaps(self, since_s: float, until_s: float) -> list[float]:
        """Between tokens that came in this time, and from the last before it."""
        found = []
        for times in self.times:
            found += [b - a for a, b in pairwise(times) if b > since_s and a < until_s]
        return found


async def measure(args: argparse.Namespace, trace: Path) -> dict[str, object]:
    """Run it and give the figures, in milliseconds."""
    rng = random.Random(0)
    worst: list[float] = []
    first: list[float] = []
    async with Runtime(model=args.model, max_rows=args.rows + 1, trace=str(trace)) as runtime:
        streams = Streams(runtime, args.rows)
        async with asyncio.TaskGroup() as group:
            lengths = [round(math.exp(rng.uniform(math.log(64), math.log(1024)))) for _ in range(args.rows)]
            tasks = [group.create_task(streams.run(row, length)) for row, length in enumerate(lengths)]
            await streams.advance(APART_TOKENS)
            for number in range(args.joins + WARM_UP):
                began_s = time.perf_counter()
                async with runtime.stream(generation(args.prompt, 8, 1000 + number)) as events:
                    first_s = 0.0
                    while batch := await events.take():
                        if not first_s and any(getattr(event, "tokens", ()) for event in batch):
                            first_s = time.perf_counter()
                await asyncio.sleep(AFTER_S)
                if number >= WARM_UP:
                    worst.append(max(streams.gaps(began_s, first_s + AFTER_S)))
                    first.append(first_s - began_s)
                await streams.advance(APART_TOKENS)
            quiet_s = time.perf_counter()
            await streams.advance(args.quiet)
            quiet = streams.gaps(quiet_s, time.perf_counter())
            for task in tasks:
                task.cancel()
    spans = sorted((e for e in read_events(trace) if "waited_us" in e.get("args", ())), key=lambda span: span["ts"])
    steps = device_steps(spans[-args.quiet :])
    assert steps is not None
    return {
        "rows": args.rows,
        "prompt_tokens": args.prompt,
        "longest_gap_ms": [round(gap * 1e3, 1) for gap in worst],
        "first_token_ms": [round(seconds * 1e3, 1) for seconds in first],
        "step_p50_ms": round(percentile(quiet, 50) * 1e3, 2),
        "step_p99_ms": round(percentile(quiet, 99) * 1e3, 2),
        "device_idle_share": round(steps.idle_share, 4),
    }


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=31)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--joins", type=int, default=6)
    parser.add_argument("--quiet", type=int, default=200, help="steps without a join, for the idle share")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(args, Path(folder) / "trace.json"))), flush=True)


if __name__ == "__main__":
    main()
