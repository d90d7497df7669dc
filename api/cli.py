"""The command `mlx-troupe`.

Results go to stdout, logs and everything else to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
Commands import what they need when they run, so that `--help` is quick and a BLAS can be loaded before MLX.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from ..runtime.errors import TroupeError
from .commands import bench, cache, chat, connect, doctor, generate, models, serve, service
from .commands.common import FAILURE, INTERRUPTED, OK, USAGE, Invocation
from .flags import dashed, given_models, given_settings
from .layers import load_settings
from .logs import set_up_logging
from .options import SettingsError
from .runtime_access import open_remote_runtime
from .runtime_access import open_runtime as open_real_runtime
from .terminal import note
from .version import package_version

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .commands.common import Command
    from .runtime_access import OpenRuntime

COMMANDS: dict[str, Command] = {
    module.NAME: module for module in (serve, generate, chat, connect, models, cache, service, doctor, bench)
}


def main(
    arguments: Sequence[str] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    open_runtime: OpenRuntime = open_real_runtime,
) -> int:
    """Run one command; returns the exit code. Wrong usage exits through SystemExit, as argparse does."""
    parser = _parser()
    found = parser.parse_args(dashed(sys.argv[1:] if arguments is None else arguments))
    try:
        return _run(found, os.environ if environment is None else environment, open_runtime)
    except SettingsError as error:
        note(f"mlx-troupe: {error}")
        return USAGE
    except TroupeError as error:
        note(f"mlx-troupe: {error}")
        return FAILURE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read stdout has left; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE


def _run(arguments: argparse.Namespace, environment: Mapping[str, str], open_runtime: OpenRuntime) -> int:
    config = getattr(arguments, "config", None)
    settings = load_settings(given_settings(arguments), environment, config, given_models(arguments))
    if arguments.command not in (serve.NAME, service.NAME):
        settings = settings.of_one_model()
    if getattr(arguments, "print_config", False):
        print(settings.toml(), end="")
        return OK
    is_service = arguments.command == serve.NAME
    chosen = is_service or settings.sources["log_level"] != "default"
    set_up_logging(settings.server.log_level if chosen else "warning", settings.server.log_format)
    for warning in settings.warnings:
        note(f"mlx-troupe: {warning}")
    open_remote = open_remote_runtime if open_runtime is open_real_runtime else None
    return COMMANDS[arguments.command].run(Invocation(arguments, settings, open_runtime, environment, open_remote))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-troupe", description="Serve language models to many users at once on MLX.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"mlx-troupe {package_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        module.add(commands.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False))
    return parser


if __name__ == "__main__":
    sys.exit(main())
