"""One sampling pass: the vectorised sampler against mlx-lm's, which runs row by row.

    python -m benchmarks.sampling --rows 1,8,32 --vocabularies 512,49152 --mixes greedy,top_p

Logits are random and evaluated beforehand; a pass ends when the tokens are on the host. mlx-lm's side is what its
`BatchGenerator` does: processors row by row, one log-softmax, one call of a sampler per row. Times are the least of the
passes, in milliseconds, since other work on the machine only adds; the two sides take turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_troupe.runtime.engine.sampling import RowSampler
from mlx_troupe.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

HISTORY_TOKENS = 200
WARM_UP_PASSES = 3

MIXES: dict[str, tuple[dict[str, Any], ...]] = {
    "greedy": ({"temperature": 0.0},),
    "temperature": ({"temperature": 0.7},),
    "min_p": ({"temperature": 0.8, "min_p": 0.05},),
    "top_p": ({"temperature": 0.7, "top_p": 0.9},),
    "top_k": ({"temperature": 0.7, "top_k": 40},),
    "top_k_p": ({"temperature": 0.7, "top_k": 40, "top_p": 0.95},),
    "xtc": ({"xtc_probability": 0.5},),
    "penalties": ({"temperature": 0.7, "repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.1},),
    "mixed": (
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1},
    ),
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one pass.

    Attributes:
        mix: what the rows ask for, a key of `MIXES`.
        rows: rows in the batch.
        vocab_size: columns of the logits.
        host_ms: ours, until the lazy tokens exist.
        ours_ms: ours, until they are on the host.
        mlx_lm_ms: mlx-lm's; None when not measured.
    """

    mix: str
    rows: int
    vocab_size: int
    host_ms: float
    ours_ms: float
    mlx_lm_ms: float | None


def measure(mix: str, rows: int, vocab_size: int, passes: int, *, peer: bool = True) -> Timing:
    """Time `passes` passes of both sides over the same logits."""
    rng = np.random.default_rng(0)
    logits = mx.array(rng.normal(size=(rows, vocab_size)).astype(np.float32) * 3)
    mx.eval(logits)
    wanted = [MIXES[mix][row % len(MIXES[mix])] for row in range(rows)]
    history = rng.integers(0, vocab_size, size=HISTORY_TOKENS).tolist()
    ours = our_pass(logits, wanted, history)
    theirs = mlx_lm_pass(logits, wanted, history) if peer else None
    host_s, ours_s, theirs_s = [], [], []
    for i in range(WARM_UP_PASSES + passes):
        built, whole = ours()
        other = theirs() if theirs is not None else 0.0
        if i >= WARM_UP_PASSES:
            host_s.append(built)
            ours_s.append(whole)
            theirs_s.append(other)
    return Timing(
        mix, rows, vocab_size, min(host_s) * 1e3, min(ours_s) * 1e3, min(theirs_s) * 1e3 if theirs is not None else None
    )


def our_pass(logits: mx.array, wanted: list[dict[str, Any]], history: list[int]) -> Callable[[], tuple[float, float]]:
    """A function that makes one pass and returns its seconds: built, and done."""
    sampler = RowSampler(logits.shape[1])
    rows = list(range(len(wanted)))
    for row, fields in enumerate(wanted):
        sampler.join(row, SamplingParams(seed=row, **fields), history, 0)

    def run() -> tuple[float, float]:
        begin_s = time.perf_counter()
        sampled = sampler.sample(logits, rows)
        built_s = time.perf_counter()
        mx.eval(sampled.arrays(), sampler.extra())
        sampled.tokens.tolist()
        return built_s - begin_s, time.perf_counter() - begin_s

    return run


def mlx_lm_pass(logits: mx.array, wanted: list[dict[str, Any]], history: list[int]) -> Callable[[], float]:
    """The same as mlx-lm's generator does it; returns seconds."""
    sampler_fields = {"temperature", "top_p", "min_p", "top_k", "xtc_probability"}
    samplers, processors = [], []
    for fields in wanted:
        chosen = {name: value for name, value in fields.items() if name in sampler_fields}
        samplers.append(make_sampler(chosen.pop("temperature", 1.0), **chosen))
        processors.append(make_logits_processors(**{k: v for k, v in fields.items() if k not in sampler_fields}))
    if len({str(fields) for fields in wanted}) == 1:
        samplers = samplers[:1] * len(samplers)  # its server keeps one sampler for equal arguments
    tokens = mx.array(history)

    def run() -> float:
        begin_s = time.perf_counter()
        edited = logits
        if any(processors):
            parts = []
            for row, chain in enumerate(processors):
                part = logits[row : row + 1]
                for processor in chain:
                    part = processor(tokens, part)
                parts.append(part)
            edited = mx.concatenate(parts, axis=0)
        logprobs = edited - mx.logsumexp(edited, axis=-1, keepdims=True)
        if all(sampler is samplers[0] for sampler in samplers):
            sampled = samplers[0](logprobs)
        else:
            sampled = mx.concatenate([draw(logprobs[row : row + 1]) for row, draw in enumerate(samplers)])
        sampled.tolist()
        return time.perf_counter() - begin_s

    return run


def print_table(timings: list[Timing]) -> None:
    """One line a timing."""
    print(f"{'mix':12} {'rows':>4} {'vocabulary':>10} {'host ms':>8} {'ours ms':>8} {'mlx-lm ms':>9} {'ratio':>6}")
    for timing in timings:
        line = f"{timing.mix:12} {timing.rows:4} {timing.vocab_size:10} {timing.host_ms:8.3f} {timing.ours_ms:8.3f}"
        if timing.mlx_lm_ms is not None:
            line += f" {timing.mlx_lm_ms:9.3f} {timing.mlx_lm_ms / timing.ours_ms:6.1f}"
        print(line)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling", description="Time one sampling pass.")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--vocabularies", default="512,49152,151936")
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--no-peer", action="store_true", help="leave mlx-lm out")
    parser.add_argument("--json", type=Path, help="write the timings to this file")
    options = parser.parse_args()
    timings = [
        measure(mix, int(rows), int(vocab_size), options.passes, peer=not options.no_peer)
        for vocab_size in options.vocabularies.split(",")
        for rows in options.rows.split(",")
        for mix in options.mixes.split(",")
    ]
    print_table(timings)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(timing) for timing in timings], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
