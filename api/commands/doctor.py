"""`mlx-troupe doctor`: what this machine offers, and what would make it better."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import msgspec

from ..runtime_access import diagnostics
from ..terminal import note, size
from .common import FAILURE, OK, Invocation

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

NAME = "doctor"
HELP = "device, backend, memory limits, BLAS, versions, and advice"
_PACKAGES = ("mlx-troupe", "mlx", "mlx-lm", "aiohttp", "msgspec")


def add(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(invocation: Invocation) -> int:
    """Print the report; fails when MLX does not start here."""
    code = OK
    try:
        found = diagnostics()
    except Exception as error:  # a broken installation raises anything, and saying so is the point
        note(f"MLX does not start here: {type(error).__name__}: {error}")
        found, code = {"versions": _versions()}, FAILURE
    if invocation.arguments.json:
        print(msgspec.json.encode(found).decode())
    else:
        _print(found)
    return code


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _print(found: Mapping[str, Mapping[str, Any]]) -> None:
    for place, (section, facts) in enumerate(found.items()):
        if place:
            print()
        print(section)
        for name, value in facts.items():
            print(f"  {name.replace('_', ' '):24} {_shown(name, value)}")
        if not facts:
            print("  none")


def _shown(name: str, value: object) -> str:
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case int() if name.endswith("_bytes"):
            return size(value)
    return str(value)
