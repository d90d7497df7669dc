"""`mlx-troupe bench`: load tests, side by side, micro-benchmarks. The work is done in `mlx_troupe.benchmarks`."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ...runtime.errors import TroupeError
from ..flags import add_model, add_settings
from ..options import SettingsError
from ..terminal import progress_bar
from .bench_flags import add_contenders, add_load, add_micro, add_server

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator

    from ...runtime.service import Service
    from .common import Invocation

NAME = "bench"
HELP = "measure servers and the runtime: load tests, side by side, micro-benchmarks"


def add(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its verbs."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    run_help = "load one server (--url), or the runtime in this process"
    running = verbs.add_parser("run", help=run_help, description=run_help, allow_abbrev=False)
    add_model(running)
    running.add_argument("--url", help="server to load; none loads MODEL in this process")
    add_server(running)
    add_load(running)
    add_settings(running, ("runtime",), extra=("log_level",))
    compare_help = "the same load on several servers in turn, interleaved, with ratios to the first"
    comparing = verbs.add_parser("compare", help=compare_help, description=compare_help, allow_abbrev=False)
    add_contenders(comparing)
    add_load(comparing)
    micro_help = "single parts of the runtime, each beside its physical floor on this machine"
    measuring = verbs.add_parser("micro", help=micro_help, description=micro_help, allow_abbrev=False)
    add_micro(measuring)
    report_help = "the table, and the page, of a file that --json wrote"
    reporting = verbs.add_parser("report", help=report_help, description=report_help, allow_abbrev=False)
    reporting.add_argument("file", metavar="FILE")
    reporting.add_argument("--html", metavar="FILE", help="write the page here")
    trace_help = "what a trace (serve --trace FILE, run --trace FILE) says in a few figures"
    tracing = verbs.add_parser("trace", help=trace_help, description=trace_help, allow_abbrev=False)
    tracing.add_argument("file", metavar="FILE")


def run(invocation: Invocation) -> int:
    """Do what the verb says. Raises SettingsError for options that cannot be, TroupeError when nothing can be run."""
    try:
        from ...benchmarks import commands
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.endswith("benchmarks"):
            raise
        raise TroupeError("mlx_troupe.benchmarks is missing: install mlx-troupe again") from None

    arguments = invocation.arguments
    try:
        match arguments.verb:
            case "report":
                return commands.remake(arguments)
            case "micro":
                return commands.micro(arguments)
            case "trace":
                return commands.summarise_trace(arguments)
            case "compare":
                commands.check(arguments)
                return commands.compare(arguments)
            case _:
                commands.check(arguments)
                return asyncio.run(commands.run(arguments, lambda: _service(invocation)))
    except TroupeError:
        raise
    except ValueError as error:
        raise SettingsError(str(error)) from None
    except (OSError, RuntimeError) as error:
        raise TroupeError(str(error)) from None


@asynccontextmanager
async def _service(invocation: Invocation) -> AsyncIterator[Service]:
    bar = progress_bar()
    async with invocation.open_runtime(invocation.settings.runtime, bar) as service:
        if bar is not None:
            bar.close()
        yield service
