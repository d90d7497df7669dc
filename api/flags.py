"""Settings as command-line flags, for argparse."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .options import Option, all_options, options_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .layers import Settings

TITLES = {"server": "server settings", "runtime": "runtime settings", "pool": "several models"}


def add_settings(
    parser: argparse.ArgumentParser, sections: Sequence[str], extra: Iterable[str] = (), *, models: bool = False
) -> None:
    """A flag for every setting of the sections and for the named ones of others, `--config`, `--print-config`.

    With `models`, `--model` may be given repeatedly.
    """
    general = parser.add_argument_group("settings", "flags > environment (MLX_TROUPE_...) > --config file > defaults")
    general.add_argument("--config", metavar="FILE", help="TOML file of settings")
    general.add_argument("--print-config", action="store_true", help="print the settings in force, and stop")
    options = all_options()
    for name in extra:
        _add(general, options[name])
    for section in sections:
        group = parser.add_argument_group(TITLES[section])
        for option in options_of(section):
            _add(group, option, repeated=models and option.name == "model")


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model as the one argument that needs no flag."""
    parser.usage = "%(prog)s [MODEL] [options]"
    parser.add_argument("named_model", nargs="?", metavar="MODEL", help='folder, Hugging Face id, .gguf file or "demo"')


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line names, by name."""
    given = {name: value for name, value in vars(arguments).items() if name in all_options()}
    models = given_models(arguments)
    return given | {"model": models[0]} if models else given


def given_models(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The models that the command line names: the one without a flag before the others, where several may be."""
    flagged = getattr(arguments, "model", None) or []
    named = getattr(arguments, "named_model", None)
    before = () if named is None else (named,)
    if isinstance(flagged, str):
        return before or (flagged,)
    return (*before, *flagged)


def as_arguments(settings: Settings, replaced: Mapping[str, str]) -> list[str]:
    """Flags that give the same settings to a process without environment or file; `replaced` has texts of its own."""
    found = []
    for option in all_options().values():
        if settings.sources[option.name] == "default":
            continue
        value = settings.value(option)
        if option.name == "model" and settings.models:
            continue
        if option.plain is bool:
            found.append(option.flag if value else "--no-" + option.flag.removeprefix("--"))
        else:
            found.append(f"{option.flag}={replaced.get(option.name, _written(value))}")
    return found


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)


def dashed(arguments: Sequence[str]) -> list[str]:
    """Arguments with `--some_flag` written as `--some-flag`; those after `--` are left alone."""
    found: list[str] = []
    for place, argument in enumerate(arguments):
        if argument == "--":
            return [*found, *arguments[place:]]
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            argument = name.replace("_", "-") + equals + value
        found.append(argument)
    return found


def _add(group: argparse._ArgumentGroup, option: Option, *, repeated: bool = False) -> None:
    text = f"{option.help} (default: {_shown(option)})".replace("%", "%%")
    if option.plain is bool:
        group.add_argument(
            option.flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text, dest=option.name
        )
    else:
        text = f"{text}; may be given repeatedly" if repeated else text
        action = "append" if repeated else "store"
        group.add_argument(
            option.flag, action=action, default=argparse.SUPPRESS, metavar=option.metavar, help=text, dest=option.name
        )


def _shown(option: Option) -> str:
    default = option.default
    if default is None:
        return "none"
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, tuple):
        return ",".join(map(str, default)) or "none"
    return str(default) or "none"
