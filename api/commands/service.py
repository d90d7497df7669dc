"""`mlx-troupe service`: a server that starts by itself, under launchd or systemd."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..edits import EditRefused, replace_file
from ..flags import add_model, add_settings, as_arguments, given_models
from ..keys import KEYS_VARIABLE, load_keys
from ..layers import CONFIG_VARIABLE
from ..options import SettingsError
from ..services import MARK, ServicePlan, service_plan
from ..terminal import note
from .common import FAILURE, OK, Invocation
from .serve import require_keys

if TYPE_CHECKING:
    import argparse

NAME = "service"
HELP = "run the server in the background, also after a restart of this machine"

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_PATHS = ("api_key_file", "cache_dir", "warm_prompts")
_STOP_EXTRA_S = 15.0  # for loading to notice, and for unloading


def add(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its three verbs."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    install = verbs.add_parser("install", help="write the service's file and start it; takes the settings of serve")
    add_model(install)
    add_settings(install, ("server", "runtime", "pool"), models=True)
    remove = verbs.add_parser("remove", help="stop it and delete its file")
    status = verbs.add_parser("status", help="say whether it runs")
    for verb in (install, remove, status):
        verb.add_argument("--name", default="mlx-troupe", help="of the service; several may run (default: mlx-troupe)")
    for verb in (install, remove):
        verb.add_argument("--dry-run", action="store_true", help="print what would be written and run")


def run(invocation: Invocation) -> int:
    """Do what the verb says."""
    arguments = invocation.arguments
    if not _NAME.fullmatch(arguments.name):
        raise SettingsError(f"--name {arguments.name!r}: small letters, digits and dashes")
    plan = _plan(invocation)
    match arguments.verb:
        case "install":
            return _install(invocation, plan)
        case "remove":
            return _remove(plan, dry=arguments.dry_run)
        case _:
            return _status(plan)


def _plan(invocation: Invocation) -> ServicePlan:
    home = Path(invocation.environment.get("HOME") or Path.home())
    config_home = Path(invocation.environment.get("XDG_CONFIG_HOME") or home / ".config")
    return service_plan(
        sys.platform,
        invocation.arguments.name,
        _command(invocation),
        home=home,
        config_home=config_home,
        user_id=os.getuid(),
        stop_s=invocation.settings.runtime.drain_timeout_s + _STOP_EXTRA_S,
    )


def _command(invocation: Invocation) -> list[str]:
    """The server's command line: every setting that is not a default, as a flag."""
    if invocation.arguments.verb != "install":
        return [sys.executable]
    replaced = {name: str(Path(value).absolute()) for name in _PATHS if (value := _value(invocation, name))}
    model = invocation.settings.runtime.model
    if model and Path(model).exists():
        replaced["model"] = str(Path(model).absolute())
    flags = [*as_arguments(invocation.settings, replaced), *_models(invocation)]
    return [sys.executable, "-m", "mlx_troupe.api.cli", "serve", *flags]


def _models(invocation: Invocation) -> list[str]:
    """Several models as flags; those of a file are read from it again."""
    if not invocation.settings.models:
        return []
    words = given_models(invocation.arguments)
    if words:
        return [f"--model={Path(word).absolute() if Path(word).exists() else word}" for word in words]
    config = invocation.arguments.config or invocation.environment[CONFIG_VARIABLE]
    return [f"--config={Path(config).absolute()}"]


def _value(invocation: Invocation, name: str) -> str:
    settings = invocation.settings
    return str(getattr(settings.server, name, None) or getattr(settings.runtime, name, None) or "")


def _install(invocation: Invocation, plan: ServicePlan) -> int:
    if KEYS_VARIABLE in invocation.environment:
        raise SettingsError(f"a service does not see {KEYS_VARIABLE}: put the keys into a file, --api-key-file")
    if invocation.settings.runtime.model is None and not invocation.settings.models:
        raise SettingsError("name the model that the service is to serve")
    require_keys(invocation.settings.server, load_keys(invocation.settings.server.api_key_file, {}))
    running = _ours(plan)
    commands = (*(plan.stop if running and sys.platform == "darwin" else ()), *plan.start)
    if invocation.arguments.dry_run:
        print(f"# {plan.path}\n{plan.content.decode()}", end="")
        for command in commands:
            print(f"$ {shlex.join(command)}")
        return OK
    try:
        replace_file(plan.path, plan.content, mode=0o600)
    except EditRefused as error:
        note(f"mlx-troupe: {error}")
        return FAILURE
    code = _run_all(commands)
    print(f"{plan.path}: {'installed' if code == OK else 'written, but it did not start'}")
    note(plan.advice)
    return code


def _remove(plan: ServicePlan, *, dry: bool) -> int:
    if not _ours(plan):
        note(f"{plan.path}: not installed")
        return FAILURE
    if dry:
        for command in (*plan.stop, ("rm", str(plan.path)), *plan.forget):
            print(f"$ {shlex.join(command)}")
        return OK
    _run_all(plan.stop)
    plan.path.unlink()
    code = _run_all(plan.forget)
    print(f"{plan.path}: removed")
    return code


def _status(plan: ServicePlan) -> int:
    if not _ours(plan):
        print("not installed")
        return FAILURE
    print(f"installed: {plan.path}", flush=True)
    return _run_all((plan.status,))


def _ours(plan: ServicePlan) -> bool:
    """Whether the file is there. Raises SettingsError for one that somebody else wrote."""
    try:
        content = plan.path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return False
    except OSError as error:
        raise SettingsError(f"{plan.path}: {error.strerror}") from None
    if MARK not in content:
        raise SettingsError(f"{plan.path}: not made by this command, and left alone")
    return True


def _run_all(commands: tuple[tuple[str, ...], ...]) -> int:
    """Run commands until one fails."""
    for command in commands:
        try:
            code = subprocess.run(command, check=False).returncode
        except OSError as error:
            note(f"{command[0]}: {error.strerror}")
            return FAILURE
        if code:
            note(f"{shlex.join(command)}: exit code {code}")
            return FAILURE
    return OK
