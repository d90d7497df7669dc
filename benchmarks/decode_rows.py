"""Decode speed of the engine against mlx_lm's BatchGenerator: the same random-weight model, prompts and sampling.

    python -m benchmarks.decode_rows --shape 8b --rows 32 --mix mixed --rounds 5

Speed does not depend on the weights' values. Prompts are log-uniform in --low..--high tokens, so rows are ragged. Both
sides run in this process, in turn, and the ratio is the median over rounds. BatchGenerator knows no per-row seed: its
samplers are the same but for that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from typing import Any

from mlx_troupe.runtime.models.blas import load_blas

load_blas()

import mlx.core as mx  # noqa: E402  (BLAS must be loaded first)
from mlx_lm.generate import BatchGenerator  # noqa: E402
from mlx_lm.sample_utils import make_sampler  # noqa: E402

from mlx_troupe.runtime.clock import MonotonicClock  # noqa: E402
from mlx_troupe.runtime.config import RuntimeConfig  # noqa: E402
from mlx_troupe.runtime.engine.build import build_engine  # noqa: E402
from mlx_troupe.runtime.messages.decode import StepResult  # noqa: E402
from mlx_troupe.runtime.messages.executor import Chunk, JoinRow, LeaveRow, StepPlan  # noqa: E402
from mlx_troupe.runtime.sampling_params import SamplingParams  # noqa: E402

SHAPES = {
    "1.7b": {"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144, "heads": 16, "kv_heads": 8},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "heads": 32, "kv_heads": 8},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 192, "heads": 4, "kv_heads": 2},
}
BANDWIDTH_BYTES_S = 4.3e12
"""Copy bandwidth measured on one H200; the floor is the weights' bytes over it."""


def config_of(shape: str, vocab: int) -> dict[str, Any]:
    """What `config.json` of a Qwen3 model of that shape holds."""
    sizes = SHAPES[shape]
    return {
        "model_type": "qwen3",
        "hidden_size": sizes["hidden_size"],
        "num_hidden_layers": sizes["num_hidden_layers"],
        "intermediate_size": sizes["intermediate_size"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "head_dim": 16 if shape == "tiny" else 128,
        "tie_word_embeddings": shape != "8b",
        "rope_scaling": None,
    }


def build_model(shape: str, vocab: int, dtype: mx.Dtype) -> Any:
    """A Qwen3 model with random weights."""
    from mlx_lm.models.qwen3 import Model, ModelArgs

    mx.random.seed(0)
    model = Model(ModelArgs(**config_of(shape, vocab)))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def prompts_of(args: argparse.Namespace) -> list[list[int]]:
    """Ragged random prompts, or those of the skewed case."""
    rng = random.Random(1)
    if args.long:
        lengths = [args.long] + [args.low] * (args.rows - 1)
    else:
        low, high = math.log(args.low), math.log(args.high)
        lengths = [round(math.exp(rng.uniform(low, high))) for _ in range(args.rows)]
    return [[rng.randrange(args.vocab) for _ in range(length)] for length in lengths]


def settings_of(mix: str, row: int) -> dict[str, Any]:
    """Sampling of one row: greedy, or one of four settings (each new value makes mlx_lm compile its filters again)."""
    if mix == "greedy":
        return {"temperature": 0.0}
    return {"temperature": (0.6, 0.7, 0.8, 1.0)[row % 4], "top_p": (0.8, 0.9, 0.95, 1.0)[row % 4]}


class OurSide:
    """The engine, driven by plans; two in flight as decode would."""

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        config = RuntimeConfig(overlap=args.overlap)
        self.engine = build_engine(model, config, MonotonicClock(), vocab_size=args.vocab, context_length=40960)
        self.step = 0
        self.results = 0
        self.stamps: list[float] = []

    def hear(self, message: object) -> None:
        if isinstance(message, StepResult):
            self.results += 1
            self.stamps.append(time.perf_counter())

    def send(self, **parts: Any) -> None:
        self.step += 1
        self.engine.run(StepPlan(self.step, **parts), self.hear)

    def run(self, prompts: list[list[int]], args: argparse.Namespace) -> list[float]:
        """Seconds of each timed step."""
        base = self.step * 1000
        rows = tuple(base + place for place in range(len(prompts)))
        for row, prompt in zip(rows, prompts, strict=True):
            for start in range(0, len(prompt) - 1, 2048):
                tokens = tuple(prompt[:-1][start : start + 2048])
                self.send(chunks=(Chunk(row, tokens, start),))
        joins = tuple(
            JoinRow(row, row, len(prompt) - 1, prompt[-1], SamplingParams(seed=place, **settings_of(args.mix, place)))
            for place, (row, prompt) in enumerate(zip(rows, prompts, strict=True))
        )
        self.send(rows=rows, joins=joins, discards=rows)
        for _ in range(args.warm):
            self.send(rows=rows)
        self.stamps = [time.perf_counter()]
        for _ in range(args.steps):
            self.send(rows=rows)
        stamps = self.stamps
        self.send(leaves=tuple(LeaveRow(row) for row in rows))
        return [b - a for a, b in itertools.pairwise(stamps)][: args.steps]


def their_side(model: Any, prompts: list[list[int]], args: argparse.Namespace) -> list[float]:
    """Seconds of each timed step of BatchGenerator."""
    generator = BatchGenerator(
        model, max_tokens=args.warm + args.steps + 64 + len(prompts), completion_batch_size=len(prompts)
    )
    samplers = []
    for place in range(len(prompts)):
        own = settings_of(args.mix, place)
        samplers.append(make_sampler(temp=own["temperature"], top_p=own.get("top_p", 0.0)))
    generator.insert(prompts, samplers=samplers if args.mix != "greedy" else None)
    while len(generator.next_generated()) < len(prompts):
        pass
    for _ in range(args.warm):
        generator.next_generated()
    seconds = []
    for _ in range(args.steps):
        began = time.perf_counter()
        generator.next_generated()
        seconds.append(time.perf_counter() - began)
    generator.close()
    return seconds


def main() -> None:
    """Run and print one JSON line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.7b")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--mix", choices=["greedy", "mixed"], default="mixed")
    parser.add_argument("--low", type=int, default=64)
    parser.add_argument("--high", type=int, default=1024)
    parser.add_argument("--long", type=int, default=0, help="one row of so many tokens, the others of --low")
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--overlap", choices=["auto", "launch", "build", "off"], default="auto")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--warm", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ours-only", action="store_true")
    args = parser.parse_args()
    model = build_model(args.shape, args.vocab, getattr(mx, args.dtype))
    plain = model if args.ours_only else build_model(args.shape, args.vocab, getattr(mx, args.dtype))
    prompts = prompts_of(args)
    ours = OurSide(model, args)  # may fuse projections of its model
    rounds = []
    warm = argparse.Namespace(**{**vars(args), "steps": 4, "warm": 2})
    ours.run(prompts, warm)  # kernels are compiled on first use, on both sides
    if not args.ours_only:
        their_side(plain, prompts, warm)
    for _ in range(args.rounds):
        mx.reset_peak_memory()
        base = mx.get_active_memory()
        own = ours.run(prompts, args)
        peak = mx.get_peak_memory() - base
        theirs = [] if args.ours_only else their_side(plain, prompts, args)
        rounds.append((own, theirs, peak))
    weights = sum(value.nbytes for _, value in __import__("mlx.utils").utils.tree_flatten(model.parameters()))
    print(json.dumps(report(args, ours, rounds, weights)), flush=True)


def report(args: argparse.Namespace, ours: OurSide, rounds: list[Any], weights: int) -> dict[str, Any]:
    """Medians over rounds, in milliseconds a step, and the ratio of tokens a second."""

    def p90(values: list[float]) -> float:
        return sorted(values)[int(0.9 * (len(values) - 1))]

    mean = [statistics.fmean(own) for own, _, _ in rounds]
    out: dict[str, Any] = {
        "shape": args.shape,
        "rows": args.rows,
        "mix": args.mix,
        "long": args.long,
        "overlap": ours.engine.facts.overlap,
        "ours_ms": round(statistics.median(mean) * 1e3, 2),
        "ours_p50_ms": round(statistics.median(statistics.median(own) for own, _, _ in rounds) * 1e3, 2),
        "ours_p90_ms": round(statistics.median(p90(own) for own, _, _ in rounds) * 1e3, 2),
        "peak_mib": round(statistics.median(peak for _, _, peak in rounds) / 2**20),
        "floor_weights_ms": round(weights / BANDWIDTH_BYTES_S * 1e3, 2),
    }
    if not args.ours_only:
        theirs = [statistics.fmean(other) for _, other, _ in rounds]
        out["theirs_ms"] = round(statistics.median(theirs) * 1e3, 2)
        out["ratio"] = round(statistics.median(b / a for a, b in zip(mean, theirs, strict=True)), 2)
        out["ratios"] = [round(b / a, 2) for a, b in zip(mean, theirs, strict=True)]
    return out


if __name__ == "__main__":
    main()
