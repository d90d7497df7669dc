"""Several models of one server: from `--model` given repeatedly, or from a settings file's `[[models]]` tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ..runtime.pool.settings import PooledModel, look_up, model_name
from .options import SettingsError, options_of, toml_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..runtime.config import RuntimeConfig

TABLES = "models"
_OF_THE_PROCESS = frozenset(
    {"allow_download", "cache_dir", "cache_disk_bytes", "drain_timeout_s", "memory", "memory_limit_bytes", "trace"}
)
_OWN = ("name", "model", "aliases", "pin", "ttl_s")


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    name: str = ""
    aliases: tuple[str, ...] = ()
    pin: bool = False
    ttl_s: float | None = None


def pooled_models(tables: Sequence[Mapping[str, Any]], base: RuntimeConfig, source: str) -> tuple[PooledModel, ...]:
    """The models that tables describe; settings that a table does not have are those of `base`.

    A table has `model` (or `path`), and may have `name`, `aliases`, `pin`, `ttl_s` and settings of the runtime.

    Raises:
        SettingsError: a table that cannot be understood, or two models of one name.
    """
    models = tuple(_pooled(table, base, f"{source} [[{TABLES}]] {place + 1}") for place, table in enumerate(tables))
    models = models[:1] + tuple(
        msgspec.structs.replace(model, config=msgspec.structs.replace(model.config, trace="")) for model in models[1:]
    )  # one file cannot take two traces
    try:
        look_up(models)
    except ValueError as error:
        raise SettingsError(f"{source}: {error}") from None
    return models


def _pooled(table: Mapping[str, Any], base: RuntimeConfig, source: str) -> PooledModel:
    given = {key.replace("-", "_"): value for key, value in table.items()}
    if "path" in given:
        given.setdefault("model", given.pop("path"))
    own = {key: given.pop(key) for key in _OWN if key in given}
    try:
        read = msgspec.convert(own, _Table)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {error}") from None
    options = {option.name: option for option in options_of("runtime")}
    settings: dict[str, Any] = {}
    for key, value in given.items():
        if key in _OF_THE_PROCESS:
            raise SettingsError(f"{source}: {key!r} is the whole server's; set it in [runtime]")
        if key not in options or key == "served_name":
            raise SettingsError(
                f"{source}: there is no setting {key!r}; {', '.join(_OWN)} and settings of [runtime] are"
            )
        settings[key] = options[key].read(value, f"{source}, {key}")
    name = read.name or model_name(read.model)
    config = msgspec.structs.replace(base, **settings, model=read.model, served_name=name)
    return PooledModel(name=name, config=config, aliases=read.aliases, pin=read.pin, ttl_s=read.ttl_s)


def tables_of(models: Sequence[PooledModel], base: RuntimeConfig) -> list[str]:
    """Lines of a settings file that give the same models."""
    lines = []
    for model in models:
        config = msgspec.structs.asdict(model.config)
        changed = {
            key: value
            for key, value in config.items()
            if value != getattr(base, key) and key not in ("model", "served_name", "trace")
        }
        given: dict[str, Any] = {
            "name": model.name,
            "model": model.config.model,
            "aliases": model.aliases,
            "pin": model.pin,
        }
        lines += ["", f"[[{TABLES}]]"]
        given |= {} if model.ttl_s is None else {"ttl_s": model.ttl_s}
        lines += [
            f"{key} = {toml_value('none' if value is None else value)}" for key, value in (given | changed).items()
        ]
    return lines
