"""What `mlx-troupe bench run | compare | report` do, once the command line has been read."""

from __future__ import annotations

import asyncio
import platform
import sys
import tempfile
from contextlib import AsyncExitStack, ExitStack
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import blas
from .contenders import Contender, answers, first_model, parse_contender, running
from .file_limit import most_connections
from .http_stream import Target as Address
from .interleave import run_plan
from .measure import tokens_per_word
from .options import plan_of
from .reports.lines import Results, read_lines
from .reports.page import page
from .reports.progress import Progress
from .reports.table import report
from .servers import Site
from .targets.http import HttpTarget
from .targets.local import LocalTarget
from .trace_summary import summary

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from mlx_troupe.runtime.service import Service

    from .targets.ask import Target

    OpenService = Callable[[], AbstractAsyncContextManager[Service]]

UNCALIBRATED = 1.0
"""Tokens a word where a server does not say how many tokens a prompt had."""


def check(arguments: argparse.Namespace) -> None:
    """Raise ValueError, naming the option, for what cannot be run; does nothing else."""
    plan_of(arguments)
    _key(arguments)
    _check_users(arguments)
    for path in (arguments.json, arguments.html):
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise ValueError(f"{path}: its folder does not exist")
    if arguments.verb == "compare":
        _contenders(arguments)


async def run(arguments: argparse.Namespace, open_service: OpenService) -> int:
    """`bench run`: one server, or the runtime in this process. Exit status 1 if any request failed."""
    async with AsyncExitStack() as stack:
        target: Target
        if arguments.url:
            target = await _http_target(arguments)
        else:
            service = await stack.enter_async_context(open_service())
            target = LocalTarget("in process", service)
        return await _measured(arguments, [target])


def compare(arguments: argparse.Namespace) -> int:
    """`bench compare`: several servers, interleaved. Exit status 1 if any request failed."""
    with ExitStack() as stack:
        logs = Path(arguments.logs or stack.enter_context(tempfile.TemporaryDirectory()))
        logs.mkdir(parents=True, exist_ok=True)
        library = None if arguments.no_blas else blas.found()
        site = Site(_model_path(arguments.named_model), None, logs, library, arguments.fresh_home)
        return asyncio.run(_compare(arguments, site))


async def _compare(arguments: argparse.Namespace, site: Site) -> int:
    async with running(
        _contenders(arguments),
        site,
        start_timeout_s=arguments.start_timeout,
        model_names=_model_names(arguments.model_name),
        api_key=_key(arguments),
    ) as targets:
        return await _measured(arguments, targets)


def remake(arguments: argparse.Namespace) -> int:
    """`bench report`: the table, and the HTML page if asked, of a file of JSON lines."""
    line, measurements = read_lines(Path(arguments.file))
    print(report(measurements, line.plan))
    if arguments.html:
        Path(arguments.html).write_text(page(line.about, line.plan, measurements))
    return 0


def micro(arguments: argparse.Namespace) -> int:
    """`bench micro`: single parts beside their floors."""
    from .micro import run as parts

    parts.check(arguments)
    return parts.run(arguments)


def summarise_trace(arguments: argparse.Namespace) -> int:
    """`bench trace`: the figures of a Chrome trace."""
    print(summary(Path(arguments.file)))
    return 0


async def _measured(arguments: argparse.Namespace, targets: Sequence[Target]) -> int:
    plan = plan_of(arguments, tokens_per_word=await _calibrated(arguments, targets[0]))
    progress = Progress()
    with Results(arguments.json, arguments.html, _about(targets), plan) as results:
        try:
            async with progress.ticking():
                async for measurement in run_plan(targets, plan, progress.watch):
                    progress.done(measurement)
                    results.add(measurement)
        finally:  # what there is, also when somebody stops it or a server dies
            print(report(results.measurements, plan), flush=True)
    return 1 if any(one.figures.errors for one in results.measurements) else 0


async def _calibrated(arguments: argparse.Namespace, target: Target) -> float:
    """Tokens a word of the first target; the others get the same text."""
    if arguments.tokens_per_word is not None:
        return UNCALIBRATED
    found = await tokens_per_word(target, arguments.endpoint, arguments.request_timeout)
    if found is None:
        print(f"{target.name} does not count prompt tokens: lengths are in words", file=sys.stderr)
    return found or UNCALIBRATED


async def _http_target(arguments: argparse.Namespace) -> HttpTarget:
    address = Address.from_url(arguments.url, "", _key(arguments))
    target = HttpTarget(arguments.url.rstrip("/"), address)
    if not await answers(target):
        raise RuntimeError(f"no healthy server at {arguments.url}")
    names = _model_names(arguments.model_name)
    name = names.get("") or await first_model(target)
    target.address = Address.from_url(arguments.url, name, _key(arguments))
    return target


def _contenders(arguments: argparse.Namespace) -> list[Contender]:
    peers = Path(arguments.peers).resolve() if arguments.peers else None
    found = [parse_contender(text, peers) for text in arguments.server]
    if len({one.name for one in found}) < len(found):
        raise ValueError("--server: two have the same name")
    for one in found:
        if "{model}" in one.command and not arguments.named_model:
            raise ValueError(f"--server {one.name} wants a model: name it as the argument")
    return found


def _check_users(arguments: argparse.Namespace) -> None:
    """Raise ValueError for more users than there can be connections."""
    users, most = max(level.users for level in plan_of(arguments).levels), most_connections()
    if users > most and (arguments.verb == "compare" or arguments.url):
        raise ValueError(f"--users {users}: this process may open {most} connections (ulimit -n)")


def _model_path(name: str | None) -> str:
    """A folder or file as an absolute path, since servers run elsewhere; anything else, such as a hub id, as it is."""
    return str(Path(name).resolve()) if name and Path(name).exists() else name or ""


def _model_names(given: Sequence[str]) -> dict[str, str]:
    """Model names by server of "NAME=MODEL"; the key of a plain "MODEL" is empty."""
    names = {}
    for text in given:
        server, separator, model = text.partition("=")
        names[server if separator else ""] = model if separator else text
    return names


def _key(arguments: argparse.Namespace) -> str | None:
    try:
        return Path(arguments.key_file).read_text().strip() if arguments.key_file else None
    except OSError as error:
        raise ValueError(f"--key-file: {error}") from None


def _about(targets: Sequence[Target]) -> dict[str, Any]:
    versions = {}
    for package in ("mlx-troupe", "mlx", "mlx-lm"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "command": " ".join(sys.argv),
        "targets": [target.name for target in targets],
        "machine": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "versions": versions,
    }
