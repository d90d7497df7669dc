"""Host overhead: the whole runtime in process against a bare loop of the same model, at the same rows and lengths.

    python -m benchmarks.overhead FOLDER --rows 32 --rounds 7

The bare loop is mlx-lm's model, argmax and `tolist`; ours is requests, actors, sampling, detokenising and events.
Rounds alternate in one process and the ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import TYPE_CHECKING

from mlx_troupe.runtime.models.blas import load_blas

load_blas()

from mlx_troupe.runtime import Generation, Runtime, SamplingParams  # noqa: E402  (BLAS must be loaded first)
from mlx_troupe.runtime.events import TextDelta  # noqa: E402

from .bare_loop import bare_loop_ms  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence


async def one_row(
    runtime: Runtime, prompt: Sequence[int], row: int, args: argparse.Namespace, stamps: list[float]
) -> None:
    """Stream one request; a stamp per token."""
    mixed = args.mix == "mixed"
    sampling = (
        SamplingParams(temperature=0.5 + 0.02 * row, top_p=0.9, seed=row) if mixed else SamplingParams(temperature=0)
    )
    generation = Generation(
        tokens=tuple(prompt), sampling=sampling, max_tokens=args.steps + args.skip, ignore_eos=True, cache=False
    )
    async with runtime.stream(generation) as events:
        while batch := await events.take():
            now = time.perf_counter()
            stamps.extend(now for event in batch if isinstance(event, TextDelta) for _ in event.tokens)


async def ours_ms(runtime: Runtime, args: argparse.Namespace) -> float:
    """Milliseconds a step while all rows decode: the middle of the run, without ramp up and down."""
    prompts = [[(7 * row + place) % 200 + 20 for place in range(args.prompt)] for row in range(args.rows)]
    stamps: list[float] = []
    await asyncio.gather(*(one_row(runtime, prompt, row, args, stamps) for row, prompt in enumerate(prompts)))
    stamps.sort()
    rows: int = args.rows
    low, high = rows * int(args.skip), rows * int(args.steps)
    return (stamps[high] - stamps[low]) / ((high - low) / rows) * 1e3


async def run(args: argparse.Namespace) -> None:
    """Alternate both sides and print one JSON line."""
    rounds = []
    async with Runtime(model=args.folder, overlap=args.overlap, max_rows=max(64, args.rows)) as runtime:
        await ours_ms(runtime, args)
        for _ in range(args.rounds):
            ours = await ours_ms(runtime, args)
            bare = await asyncio.to_thread(_bare, args)
            rounds.append((ours, bare))
    ratios = [ours / bare for ours, bare in rounds]
    print(
        json.dumps(
            {
                "rows": args.rows,
                "mix": args.mix,
                "ours_ms": round(statistics.median(ours for ours, _ in rounds), 2),
                "bare_ms": round(statistics.median(bare for _, bare in rounds), 2),
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 2) for ratio in ratios],
            }
        )
    )


def _bare(args: argparse.Namespace) -> float:
    from mlx_lm import load

    model = load(args.folder)[0]
    return bare_loop_ms(model, args.rows, args.steps, args.prompt + args.skip)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=192)
    parser.add_argument("--skip", type=int, default=64, help="tokens of ramp-up that are not timed")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--mix", choices=["greedy", "mixed"], default="greedy")
    parser.add_argument("--overlap", choices=["auto", "launch", "build", "off"], default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
