"""Settings in layers: flags over environment over file over defaults, each value with where it came from."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..runtime.config import RuntimeConfig
from ..runtime.pool.settings import PooledModel, PoolSettings
from .keys import KEYS_VARIABLE
from .model_tables import TABLES, pooled_models, tables_of
from .options import SECTIONS, Option, SettingsError, all_options, toml_value
from .settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CONFIG_VARIABLE = "MLX_TROUPE_CONFIG"
_PREFIX = "MLX_TROUPE_"
_CLOSE = 0.85
_CACHE_VARIABLE = "MLX_TROUPE_CACHE"  # where the runtime keeps models and prefixes; no setting


class Settings(msgspec.Struct, frozen=True):
    """All settings that are in force.

    Attributes:
        server: of the HTTP server.
        runtime: of the runtime.
        pool: of several models.
        models: which those are; empty for the one of `runtime`.
        sources: where each value came from, by name.
        warnings: what looks like a mistake.
    """

    server: ServerSettings
    runtime: RuntimeConfig
    sources: dict[str, str]
    warnings: tuple[str, ...] = ()
    pool: PoolSettings = PoolSettings()
    models: tuple[PooledModel, ...] = ()

    def value(self, option: Option) -> object:
        """The value in force."""
        return getattr(getattr(self, option.section), option.name)

    def of_one_model(self) -> Settings:
        """For commands that have one model: the first."""
        return msgspec.structs.replace(self, runtime=self.models[0].config, models=()) if self.models else self

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
            shown = f"# {option.name} = none" if value is None else f"{option.name} = {toml_value(value)}"
            lines.append(f"{shown}  # {source}")
        lines += tables_of(self.models, self.runtime)
        return "\n".join(lines) + "\n"


def load_settings(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    config: str | None = None,
    models: Sequence[str] = (),
) -> Settings:
    """Settings from all layers.

    Args:
        flags: values of the command line by setting name, as text or typed.
        environment: of the process; variables are `MLX_TROUPE_` and the name in capitals.
        models: those of the command line, when it names several.
        config: path of a TOML file; None reads the one that `MLX_TROUPE_CONFIG` names, if any.

    Raises:
        SettingsError: a file that cannot be read, an unknown name in it, or a value that does not fit.
    """
    options = all_options()
    path = config if config is not None else environment.get(CONFIG_VARIABLE) or None
    tables = _read_file(path) if path is not None else {}
    described = tables.pop(TABLES, ())
    layers = [
        _file_layer(path or "", tables, options),
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
    runtime = cast("RuntimeConfig", _built("runtime", values, options))
    return Settings(
        cast("ServerSettings", _built("server", values, options)),
        runtime,
        sources,
        tuple(_misspelt(environment, options)),
        cast("PoolSettings", _built("pool", values, options)),
        _models(models, described, runtime, path or "", sources["model"]),
    )


def _models(
    words: Sequence[str], tables: object, runtime: RuntimeConfig, path: str, source: str
) -> tuple[PooledModel, ...]:
    """The models of the command line, or else of the file unless another layer names one."""
    if len(words) > 1:
        named = msgspec.structs.replace(runtime, model=None)
        return pooled_models([{"model": word} for word in words], named, "flag --model")
    if not tables:
        return ()
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise SettingsError(f"{path}: {TABLES!r} are tables, each headed [[{TABLES}]]")
    if source == f"file {path}":
        raise SettingsError(f"{path}: it has a model in [runtime] and [[{TABLES}]]; keep one of them")
    found = pooled_models(tables, runtime, path)
    return found if source == "default" else ()


def _built(section: str, values: Mapping[str, Any], options: Mapping[str, Option]) -> msgspec.Struct:
    names = [option.name for option in options.values() if option.section == section]
    return SECTIONS[section](**{name: values[name] for name in names})


def _read_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from None


def _file_layer(path: str, tables: Mapping[str, Any], options: Mapping[str, Option]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for section, table in tables.items():
        if section not in SECTIONS or not isinstance(table, dict):
            raise SettingsError(
                f"{path}: {section!r} is not a table of settings; {', '.join(SECTIONS)} and [[{TABLES}]] are"
            )
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
