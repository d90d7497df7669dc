"""Flags of `mlx-troupe bench`: what is asked, when, how often, and where the figures go."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def add_load(parser: argparse.ArgumentParser) -> None:
    """Everything that describes a load and its report."""
    _add_arrivals(parser.add_argument_group("when requests are sent"))
    _add_requests(parser.add_argument_group("what is asked"))
    _add_repeats(parser.add_argument_group("how often, and how it is judged"))
    _add_outputs(parser.add_argument_group("where the figures go (a table goes to stdout)"))


def _add_arrivals(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--users", metavar="N,...", help="closed loop: so many users, a level each (default: 8)")
    group.add_argument(
        "--arrivals",
        metavar="SPEC",
        help="open loop: poisson:RATE,..., constant:RATE,..., bursts:SIZE/SECONDS,... or replay[:SPEED] of a trace; "
        "latency counts from the intended time",
    )
    group.add_argument(
        "--requests", type=int, metavar="N", help="conversations a repeat (default: 4 a user, 16 at least)"
    )
    group.add_argument("--duration", type=float, metavar="SECONDS", help="start none after so long, instead")
    group.add_argument("--request-timeout", type=float, default=300.0, metavar="SECONDS", help="for one request")


def _add_requests(group: argparse._ArgumentGroup) -> None:
    lengths = "N, loguniform:LOW-HIGH or lognormal:MEDIAN,SIGMA[,LONGEST] tokens"
    group.add_argument("--prompt-lengths", default="128", metavar="SPEC", help=f"{lengths} (default: 128)")
    group.add_argument("--output-lengths", default="64", metavar="SPEC", help=f"max_tokens: {lengths} (default: 64)")
    group.add_argument(
        "--requests-file", metavar="FILE", help="JSON lines with prompt or messages, or a trace to replay"
    )
    group.add_argument("--prefix-tokens", type=int, default=0, metavar="N", help="length of a shared opening")
    group.add_argument(
        "--prefix-groups", type=int, default=1, metavar="N", help="how many different openings there are"
    )
    group.add_argument("--turns", type=int, default=1, metavar="N", help="requests of one conversation")
    group.add_argument(
        "--think", type=float, default=0.0, metavar="SECONDS", help="between an answer and the next turn"
    )
    group.add_argument(
        "--sampling",
        default="greedy",
        metavar="SPEC",
        help="greedy, mixed (each request its own temperature, top_p and seed), unseeded, weights such as "
        "greedy:1,mixed:3, or a JSON object of request fields",
    )
    group.add_argument(
        "--leave-rate", type=float, default=0.0, metavar="SHARE", help="of clients that disconnect early"
    )
    group.add_argument("--honour-eos", action="store_true", help="let answers end early (some servers always do)")
    group.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="route of an HTTP server")
    group.add_argument("--tokens-per-word", type=float, metavar="X", help="of the tokenizer (default: asked for)")


def _add_repeats(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--warm-up", type=int, metavar="N", help="conversations before each level (default: one a user, at least 4)"
    )
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="of each level (default: 3)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of everything that is drawn")
    group.add_argument(
        "--salt", metavar="TEXT", help="opens the made-up prompts (default: the time, so nothing is cached)"
    )
    group.add_argument(
        "--objective",
        metavar="SPEC",
        help="of goodput, in seconds, such as ttft=0.5,tpot=0.05,gap=0.2,e2e=10 (default: ttft=1,tpot=0.1)",
    )
    group.add_argument("--scrape-interval", type=float, default=1.0, metavar="SECONDS", help="of /metrics; 0 is never")


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", metavar="FILE", help="JSON lines of everything measured")
    group.add_argument("--html", metavar="FILE", help="one page with the table and plots")


def add_server(parser: argparse.ArgumentParser) -> None:
    """How servers are asked."""
    group = parser.add_argument_group("servers")
    group.add_argument("--model-name", action="append", default=[], metavar="[SERVER=]MODEL", help="name to ask for")
    group.add_argument("--key-file", metavar="FILE", help="file that holds the API key")


def add_contenders(parser: argparse.ArgumentParser) -> None:
    """Which servers are compared, and how they are started."""
    parser.usage = "%(prog)s [MODEL] --server NAME[=URL|=COMMAND] ... [options]"
    parser.add_argument("named_model", nargs="?", metavar="MODEL", help="put for {model} in the commands")
    add_server(parser)
    parser.add_argument(
        "--server",
        action="append",
        required=True,
        metavar="NAME=URL|COMMAND",
        help="one that runs, or a command with {port} and perhaps {model}; "
        "or just mlx-troupe, mlx-lm, vllm-mlx, rapid-mlx",
    )
    parser.add_argument("--peers", metavar="DIR", help="folder of the known servers' environments (default: PATH)")
    parser.add_argument("--logs", metavar="DIR", help="keep the servers' logs here")
    parser.add_argument(
        "--start-timeout", type=float, default=300.0, metavar="SECONDS", help="for a server to get healthy"
    )
    parser.add_argument("--fresh-home", action="store_true", help="a throw-away HOME and no hub for those started here")
    parser.add_argument("--no-blas", action="store_true", help="do not preload OpenBLAS on Linux")


def add_micro(parser: argparse.ArgumentParser) -> None:
    """Which parts are measured, and on what."""
    parser.add_argument(
        "--parts", metavar="A,B", help="step, join, sampling, mask, tree, hop, detokenise, sse (default: all)"
    )
    parser.add_argument(
        "--shape", choices=("tiny", "1.7b", "8b"), default="tiny", help="of the random-weight model (default: tiny)"
    )
    parser.add_argument("--rows", default="1,8,32", metavar="N,...", help="in the batch (default: 1,8,32)")
    parser.add_argument(
        "--contexts", default="256,1024", metavar="N,...", help="tokens of each row (default: 256,1024)"
    )
    parser.add_argument("--vocab", type=int, default=8192, metavar="N", help="ids the model scores (default: 8192)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="timings of each case a round (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="the figures as JSON")
