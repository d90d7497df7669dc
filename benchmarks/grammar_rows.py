"""What a grammar in every row costs a step: the engine with and without, in turn, on one random-weight model.

    python -m benchmarks.grammar_rows --shape 8b --rows 32 --rounds 5

Each row has a JSON schema of its own over a vocabulary of Qwen's size. Both sides sample alike (--mix); the ratio is
the median over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
from typing import Any

from .decode_rows import SHAPES, OurSide, build_model, prompts_of, settings_of
from .grammar_masks import schema, tokens_of

import mlx.core as mx  # isort: skip  (decode_rows loads BLAS first)

from mlx_troupe.runtime.grammar import Grammar, GrammarService
from mlx_troupe.runtime.messages.executor import Chunk, JoinRow, LeaveRow
from mlx_troupe.runtime.sampling_params import SamplingParams


class GrammarSide(OurSide):
    """The engine with a constraint for each row, or without."""

    def decode(self, prompts: list[list[int]], args: argparse.Namespace, constraints: list[Any] | None) -> list[float]:
        """Seconds of each timed step."""
        base = self.step * 1000
        rows = tuple(base + place for place in range(len(prompts)))
        for row, prompt in zip(rows, prompts, strict=True):
            self.send(chunks=(Chunk(row, tuple(prompt[:-1]), 0),))
        joins = tuple(
            JoinRow(
                row,
                row,
                len(prompt) - 1,
                prompt[-1],
                SamplingParams(seed=place, **settings_of(args.mix, place)),
                constraint=None if constraints is None else constraints[place],
            )
            for place, (row, prompt) in enumerate(zip(rows, prompts, strict=True))
        )
        self.send(rows=rows, joins=joins, discards=rows)
        for _ in range(args.warm):
            self.send(rows=rows)
        self.stamps = []
        for _ in range(args.steps + 1):
            self.send(rows=rows)
        stamps = self.stamps
        self.send(leaves=tuple(LeaveRow(row) for row in rows))
        return [after - before for before, after in itertools.pairwise(stamps)][: args.steps]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of both, in milliseconds a step."""
    tokens = tokens_of(args.vocab, random.Random(1))
    ends = frozenset({args.vocab - 1})
    service = GrammarService(lambda: tokens, ends, ends)
    side = GrammarSide(build_model(args.shape, args.vocab, getattr(mx, args.dtype)), args)
    prompts = prompts_of(args)

    async def constraints() -> list[Any]:
        found = [await service.constraints(Grammar("json_schema", schema(row)), 1) for row in range(args.rows)]
        return [one[0] for one in found]

    few = argparse.Namespace(**{**vars(args), "steps": 4, "warm": 2})
    for given in (None, await constraints()):
        side.decode(prompts, few, given)
    plain, bound = [], []
    for _ in range(args.rounds):
        plain.append(statistics.fmean(side.decode(prompts, args, None)) * 1e3)
        bound.append(statistics.fmean(side.decode(prompts, args, await constraints())) * 1e3)
    service.close()
    ratios = [with_it / without for with_it, without in zip(bound, plain, strict=True)]
    return {
        "shape": args.shape,
        "rows": args.rows,
        "mix": args.mix,
        "overlap": side.engine.facts.overlap,
        "plain_ms": round(statistics.median(plain), 2),
        "grammar_ms": round(statistics.median(bound), 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--mix", choices=["greedy", "mixed"], default="mixed")
    parser.add_argument("--low", type=int, default=64)
    parser.add_argument("--high", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--overlap", choices=["auto", "launch", "build", "off"], default="auto")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--warm", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    args.long = 0
    print(json.dumps(asyncio.run(measure(args))), flush=True)


if __name__ == "__main__":
    main()
