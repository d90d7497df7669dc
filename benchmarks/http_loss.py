"""What HTTP costs: tokens a second of the runtime in this process, and of `mlx-troupe serve` on the same load.

    python -m benchmarks.http_loss MODEL --streams 64 --tokens 128
    python -m benchmarks.http_loss --shape 1.7b --streams 64 --tokens 128 --api-process on

The servers (HTTP in the engine's process, and in one of its own) and the runtime here are loaded at the same time, and
measured in turn, so the losses of one round hold on a machine that is not quiet. `--shape` writes a model of random
weights first. A loss is 1 - (tokens/s over HTTP) / (tokens/s in process) of the same round; the median counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from . import blas
from .contenders import Contender, running
from .interleave import run_plan
from .measure import BenchPlan, tokens_per_word
from .servers import Site
from .stats import median
from .targets.local import LocalTarget
from .traffic.arrivals import Level
from .traffic.conversations import Workload
from .traffic.drive import DriveSettings
from .traffic.lengths import Fixed
from .traffic.sampling_mix import parse_mix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .measure import Measurement
    from .targets.ask import Target

HERE = "in process"
NAMES = {"off": "HTTP, one process", "on": "HTTP, API process"}
START_TIMEOUT_S = 300.0


async def measured(model: Path, options: argparse.Namespace, site: Site) -> list[Measurement]:
    """Every round of every target. Raises RuntimeError when a server does not start."""
    from mlx_troupe.runtime import Runtime

    settings = ("off", "on") if options.api_process == "both" else (options.api_process,)
    contenders = [Contender(NAMES[setting], command=_command(setting, options)) for setting in settings]
    async with (
        running(contenders, site, start_timeout_s=START_TIMEOUT_S, model_names={}) as servers,
        Runtime(model=str(model), max_rows=options.streams) as runtime,
    ):
        here = LocalTarget(HERE, runtime)
        plan = _plan(options, await tokens_per_word(here, "completions", START_TIMEOUT_S) or 1.0)
        targets: list[Target] = [here, *servers]
        found = []
        async for one in run_plan(targets, plan):
            print(f"round {one.repeat} {one.target}: {one.figures.tokens_per_s:.0f} tokens/s", file=sys.stderr)
            found.append(one)
        return found


def _command(setting: str, options: argparse.Namespace) -> str:
    serve = f"{sys.executable} -m mlx_troupe.api.cli serve {{model}} --host 127.0.0.1 --port {{port}}"
    return f"{serve} --api-process {setting} --max-rows {options.streams} --no-access-log"


def _plan(options: argparse.Namespace, per_word: float) -> BenchPlan:
    return BenchPlan(
        levels=(Level(f"{options.streams} streams", users=options.streams),),
        workload=Workload(
            prompt=Fixed(options.prompt_tokens),
            output=Fixed(options.tokens),
            sampling=parse_mix(options.sampling),
            tokens_per_word=per_word,
        ),
        drive=DriveSettings(endpoint="completions", conversations=options.streams * options.requests),
        repeats=options.rounds,
        scrape_s=0.0,
    )


def losses(measurements: Sequence[Measurement], name: str) -> list[float]:
    """Of each round, as a share of the tokens a second in process."""
    rates = {(one.repeat, one.target): one.figures.tokens_per_s for one in measurements}
    rounds = sorted({one.repeat for one in measurements})
    return [1 - rates[number, name] / rates[number, HERE] for number in rounds]


def table(measurements: Sequence[Measurement]) -> str:
    """Medians over rounds."""
    lines = ["| | tokens/s | first p50 ms | gap p50 ms | gap p99 ms | loss (rounds) |", "| --- " * 6 + "|"]
    for name in dict.fromkeys(one.target for one in measurements):
        own = [one.figures for one in measurements if one.target == name]
        lost = losses(measurements, name)
        loss = "" if name == HERE else f"{statistics.median(lost):.1%} ({min(lost):.1%} to {max(lost):.1%})"
        parts = (
            [figures.tokens_per_s for figures in own],
            [figures.ttft_ms["p50"] for figures in own],
            [figures.gap_ms["p50"] for figures in own],
            [figures.gap_ms["p99"] for figures in own],
        )
        lines.append(" | ".join([f"| {name}", *(_shown(median(values)) for values in parts), f"{loss} |"]))
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _model(options: argparse.Namespace, scratch: Path) -> Path:
    if options.shape is None:
        return Path(str(options.model)).resolve()
    folder = scratch / str(options.shape)
    dtype = "float32" if options.shape == "tiny" else "bfloat16"
    command = [sys.executable, "-m", f"{__package__}.random_model", str(folder), "--shape", options.shape]
    subprocess.run([*command, "--dtype", dtype, "--vocab", str(options.vocab)], check=True, stdout=subprocess.DEVNULL)
    return folder


def main() -> int:
    """Command line; exit status 1 if any request failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.http_loss", description="What HTTP costs.")
    parser.add_argument("model", nargs="?", help="a model's folder")
    parser.add_argument("--shape", choices=("tiny", "1.7b", "8b"), help="random weights of this shape instead")
    parser.add_argument("--vocab", type=int, default=151_936, help="of the random model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1, help="per stream")
    parser.add_argument("--sampling", default="mixed", help="greedy, mixed, unseeded, or a mix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--api-process", choices=("both", "on", "off"), default="both")
    parser.add_argument("--json", type=Path, help="also write the rounds' figures here")
    options = parser.parse_args()
    if (options.model is None) == (options.shape is None):
        parser.error("give a model's folder or --shape")
    with TemporaryDirectory() as scratch:
        model = _model(options, Path(scratch))
        site = Site(model, None, Path(scratch), blas.found(), fresh_home=False)
        found = asyncio.run(measured(model, options, site))
    print(table(found))
    if options.json:
        rows = [{"round": one.repeat, "target": one.target, "tokens_per_s": one.figures.tokens_per_s} for one in found]
        options.json.write_text(json.dumps(rows, indent=1))
    return 1 if any(one.figures.errors for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
