"""Compares servers on one machine: the same load on each in turn, over several rounds.

    python -m benchmarks.compare --model MODEL --peers PEERS --servers troupe,mlxlm,vllm,rapid

All servers run from the start; only one is loaded at a time, so a noisy minute of the machine hits
all of them and the ratios of one round hold. Rounds alternate the order. Each server is warmed with
the load itself first. A ratio is that of the first server to the best other in the same round, and
the medians over rounds are what counts. Speeds want a ratio above 1, times one below.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from . import blas
from .fairness import FairnessPlan, run_fairness
from .load import add_plan_arguments, plan_from, run_load
from .pressure import LONG_WORDS, limited, run_pressure
from .servers import RECIPES, Recipe, Server, Site, custom_recipe
from .stats import median

if TYPE_CHECKING:
    from .prompts import Sampling

SCENARIOS = ("greedy", "mixed", "unseeded", "fairness", "pressure")
WARM_UP = -1
OURS = "troupe"
PRESSURE_MIB = 880


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a result, and whether more of it is better."""

    name: str
    path: tuple[str, ...]
    higher_is_better: bool = False


LOAD_METRICS = (
    Metric("tok/s", ("tokens_per_s",), higher_is_better=True),
    Metric("first p50 ms", ("first_token_ms", "p50")),
    Metric("gap p50 ms", ("gap_ms", "p50")),
    Metric("gap p99 ms", ("gap_ms", "p99")),
    Metric("gap max ms", ("gap_ms", "max")),
)
FAIRNESS_METRICS = (
    Metric("running gap s", ("running_longest_gap_s",)),
    Metric("short first s", ("short_first_token_s",)),
    Metric("long first s", ("long_first_token_s",)),
)
PRESSURE_METRICS = (
    *FAIRNESS_METRICS[:2],
    Metric("1st long s", ("first_long_s",)),
    Metric("2nd long s", ("second_long_s",)),
    Metric("one long s", ("one_long_s",)),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One server's result in one round of one scenario."""

    scenario: str
    round: int
    server: str
    server_cpu_s: float
    result: dict[str, Any]

    def value(self, metric: Metric) -> float | None:
        """The metric in this result, None where it was not measured."""
        found: Any = self.result
        for key in metric.path:
            found = found[key]
        return None if found is None else float(found)


async def compare(servers: list[Server], options: argparse.Namespace) -> list[Sample]:
    """Run all scenarios and rounds on servers that are starting up."""
    for server in servers:
        await server.healthy(options.start_timeout)
    samples = []
    for scenario in options.scenarios.split(","):
        for server in servers:
            await _measure(server, scenario, WARM_UP, options)
        for number in range(options.rounds):
            for server in servers if number % 2 == 0 else reversed(servers):
                sample = await _measure(server, scenario, number, options)
                samples.append(sample)
                print(_line(sample), file=sys.stderr, flush=True)
    return samples


async def _measure(server: Server, scenario: str, number: int, options: argparse.Namespace) -> Sample:
    """One load, or the warm-up. The prompts are the same for every server in a round."""
    salt = f"{scenario}{number}"
    cpu_s = server.cpu_s()
    if scenario == "fairness":
        plan = FairnessPlan(long_words=options.long_words, salt=salt)
        result = asdict(await run_fairness(server.target, plan))
    elif scenario == "pressure":
        share = 8 if number == WARM_UP else 1
        plan = FairnessPlan(long_words=LONG_WORDS // share, salt=salt)
        result = asdict(await run_pressure(server.target, plan, ours=server.recipe.name == OURS))
    else:
        result = asdict(await run_load(server.target, plan_from(options, cast("Sampling", scenario), salt)))
    return Sample(scenario, number, server.recipe.name, round(server.cpu_s() - cpu_s, 2), result)


def _line(sample: Sample) -> str:
    figures = [f"{metric.name} {_shown(sample.value(metric))}" for metric in _metrics(sample.scenario)]
    if errors := sample.result["errors"]:
        figures.append(f"errors {errors}")
    if memory := sample.result.get("memory"):
        figures.append(", ".join(f"{name} {count}" for name, count in memory.items()))
    if not sample.result.get("valid", True):
        figures.append("NOT VALID: the running stream ended early, or memory was not felt")
    return f"{sample.scenario} round {sample.round} {sample.server}: {', '.join(figures)}"


def _metrics(scenario: str) -> tuple[Metric, ...]:
    return {"fairness": FAIRNESS_METRICS, "pressure": PRESSURE_METRICS}.get(scenario, LOAD_METRICS)


def ratios(samples: list[Sample], metric: Metric, ours: str) -> list[float]:
    """For each round, `ours` over the best of the others."""
    best = max if metric.higher_is_better else min
    found = []
    for number in sorted({sample.round for sample in samples}):
        values = {s.server: value for s in samples if s.round == number and (value := s.value(metric))}
        own = values.pop(ours, None)
        if own is not None and values:
            found.append(own / best(values.values()))
    return found


def report(samples: list[Sample], names: list[str]) -> str:
    """Medians per server and the ratio of the first server to the best other, as Markdown."""
    blocks = []
    for scenario in dict.fromkeys(sample.scenario for sample in samples):
        chosen = [sample for sample in samples if sample.scenario == scenario]
        metrics = _metrics(scenario)
        rows = [[scenario, *(metric.name for metric in metrics)], ["---"] * (len(metrics) + 1)]
        for name in names:
            own = [sample for sample in chosen if sample.server == name]
            rows.append([name, *(_shown(median([s.value(metric) for s in own])) for metric in metrics)])
        if len(names) > 1:
            worked = [_shown(median([*ratios(chosen, metric, names[0])])) for metric in metrics]
            rows.append([f"{names[0]} / best other", *worked])
        blocks.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(blocks)


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _recipes(options: argparse.Namespace) -> list[Recipe]:
    """The named recipes, then the commands given."""
    unknown = [name for name in options.servers.split(",") if name and name not in RECIPES]
    if unknown:
        raise ValueError(f"unknown server {unknown[0]}; known: {', '.join(RECIPES)}; or --server NAME=COMMAND")
    named = [RECIPES[name] for name in options.servers.split(",") if name]
    return named + [custom_recipe(text) for text in options.server]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description="Compare servers.")
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--peers", type=Path, help="folder of the peers' virtual environments")
    parser.add_argument("--servers", default="troupe,mlxlm,vllm,rapid", help="ours first")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND", help="one more")
    parser.add_argument("--scenarios", default="greedy,mixed", help=f"of {', '.join(SCENARIOS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blas", default=blas.OPENBLAS, help="library to preload; empty for MLX's own")
    parser.add_argument("--long-words", type=int, default=FairnessPlan().long_words, help="for fairness")
    parser.add_argument("--pressure-mib", type=int, default=PRESSURE_MIB, help="memory of ours for pressure")
    parser.add_argument("--pressure-chunk", type=int, default=0, metavar="TOKENS", help="its longest chunk; 0 is any")
    parser.add_argument("--start-timeout", type=float, default=180.0, help="seconds")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    add_plan_arguments(parser)
    return parser


def main() -> int:
    """Command line; exit status 1 if any request failed."""
    options = _parser().parse_args()
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        site = Site(options.model.resolve(), options.peers, logs, options.blas or None)
        recipes = _recipes(options)
        if "pressure" in options.scenarios.split(","):
            room = options.pressure_mib, options.pressure_chunk, options.start_timeout
            recipes = [limited(recipe, site, *room) if recipe.name == OURS else recipe for recipe in recipes]
        servers = [stack.enter_context(Server(recipe, site)) for recipe in recipes]
        samples = asyncio.run(compare(servers, options))
    print(report(samples, [server.recipe.name for server in servers]))
    if options.json:
        options.json.write_text(json.dumps([asdict(sample) for sample in samples], indent=1))
    return 1 if any(sample.result["errors"] for sample in samples) else 0


if __name__ == "__main__":
    sys.exit(main())
