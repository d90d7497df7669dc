"""Settings in layers: flags over environment over file over defaults, each value with where it came from."""

from __future__ import annotations

import difflib
import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..runtime.config import RuntimeConfig
from .keys import KEYS_VARIABLE
from .options import SECTIONS, Option, SettingsError, all_options
from .settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_VARIABLE = "MLX_TROUPE_CONFIG"
_PREFIX = "MLX_TROUPE_"
_CLOSE = 0.85
_CACHE_VARIABLE = "MLX_TROUPE_CACHE"  # where the runtime keeps models and prefixes; no setting


class Settings(msgspec.Struct, frozen=True):
    """All settings that are in force.

    Attributes:
        server: of the HTTP server.
        runtime: of the runtime.
        sources: where each value came from, by name.
        warnings: what looks like a mistake.
    """

    server: ServerSettings
    runtime: RuntimeConfig
    sources: dict[str, str]
    warnings: tuple[str, ...] = ()

    def value(self, option: Option) -> object:
        """The value in force."""
        return getattr(self.server if option.section == "server" else self.runtime, option.name)

    def toml(self) -> str:
        """A settings file that gives the same, each line with its value's source."""
        lines = ["# Settings in force; a file like this one goes to --config."]
        section = ""
        for option in all_options().values():
            if option.section != section:
                section = option.section
                lines += ["", f"[{section}]"]
            value = self.value(option)
            source = self.sources[option.name]
            shown = f"# {option.name} = none" if value is None else f"{option.name} = {_toml_value(value)}"
            lines.append(f"{shown}  # {source}")
        return "\n".join(lines) + "\n"


def load_settings(flags: Mapping[str, Any], environment: Mapping[str, str], config: str | None = None) -> Settings:
    """Settings from all layers.

    Args:
        flags: values of the command line by setting name, as text or typed.
        environment: of the process; variables are `MLX_TROUPE_` and the name in capitals.
        config: path of a TOML file; None reads the one that `MLX_TROUPE_CONFIG` names, if any.

    Raises:
        SettingsError: a file that cannot be read, an unknown name in it, or a value that does not fit.
    """
    options = all_options()
    path = config if config is not None else environment.get(CONFIG_VARIABLE) or None
    layers = [
        _file_layer(path, options) if path is not None else {},
        {
            option.name: (environment[option.variable], f"environment {option.variable}")
            for option in options.values()
            if option.variable in environment
        },
        {name: (value, f"flag {options[name].flag}") for name, value in flags.items()},
    ]
    values = {option.name: option.default for option in options.values()}
    sources = dict.fromkeys(options, "default")
    for layer in layers:
        for name, (value, source) in layer.items():
            values[name] = options[name].read(value, source)
            sources[name] = source
    return Settings(
        cast("ServerSettings", _built("server", values, options)),
        cast("RuntimeConfig", _built("runtime", values, options)),
        sources,
        tuple(_misspelt(environment, options)),
    )


def _built(section: str, values: Mapping[str, Any], options: Mapping[str, Option]) -> msgspec.Struct:
    names = [option.name for option in options.values() if option.section == section]
    return SECTIONS[section](**{name: values[name] for name in names})


def _file_layer(path: str, options: Mapping[str, Option]) -> dict[str, tuple[Any, str]]:
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from None
    found: dict[str, tuple[Any, str]] = {}
    for section, table in tables.items():
        if section not in SECTIONS or not isinstance(table, dict):
            raise SettingsError(f"{path}: {section!r} is not a table of settings; {' and '.join(SECTIONS)} are")
        for key, value in table.items():
            name = key.replace("-", "_")
            if name not in options or options[name].section != section:
                raise SettingsError(f"{path}: [{section}] has no setting {key!r}{_hint(name, options)}")
            found[name] = (value, f"file {path}")
    return found


def _hint(name: str, options: Mapping[str, Option]) -> str:
    if name in options:
        return f"; it stands in [{options[name].section}]"
    close = difflib.get_close_matches(name, options, n=1)
    return f"; {close[0]!r} is close" if close else ""


def _misspelt(environment: Mapping[str, str], options: Mapping[str, Option]) -> list[str]:
    """Variables that look like a setting's and are none. Others of the prefix may belong to something else."""
    known = {option.variable for option in options.values()} | {CONFIG_VARIABLE, KEYS_VARIABLE, _CACHE_VARIABLE}
    found = []
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)
            if close:
                found.append(f"the environment's {name} is no setting; {close[0]} is close")
    return found


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return repr(value)  # inf and nan are TOML's words too
