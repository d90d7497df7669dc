"""Every setting there is, derived from the Structs that hold them: its name, type, default and help.

A value is read the same way whether it comes from a flag, the environment or a file: text is parsed by type; sizes
(`..._bytes`) take units, optional ones take "none", lists are separated by commas.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from typing import Annotated, Any, Literal

import msgspec

from ..runtime.config import RuntimeConfig
from ..runtime.pool.settings import PoolSettings
from .settings import ServerSettings

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "server": ServerSettings,
    "runtime": RuntimeConfig,
    "pool": PoolSettings,
}
# Only the command line downloads, so that it does is its default.
COMMAND_LINE_DEFAULTS: dict[str, Any] = {"allow_download": True}

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    f"{letter}{tail}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for tail, base in (("b", 1000), ("i", 1024), ("ib", 1024))
}
_METAVARS: dict[object, str] = {int: "N", float: "X", str: "TEXT"}
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[a-z]*)", re.IGNORECASE)
_ENTRY = re.compile(r"^ {4}(\w+): (.+?)(?=^ {4}\w+: |\Z)", re.MULTILINE | re.DOTALL)


class SettingsError(Exception):
    """A setting that cannot be understood; the text names it and where it came from."""


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One setting.

    Attributes:
        section: table of the settings file, and which Struct holds it.
        name: of the field; the flag has dashes, the environment variable capitals and a prefix.
        kind: its type, without None.
        optional: None is a value.
        default: when nobody sets it.
        help: what it does, in one line.
    """

    section: str
    name: str
    kind: Any
    optional: bool
    default: Any
    help: str

    @property
    def flag(self) -> str:
        """The command line's name."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment's name."""
        return "MLX_TROUPE_" + self.name.upper()

    @property
    def plain(self) -> object:
        """The type without its bounds."""
        return typing.get_args(self.kind)[0] if typing.get_origin(self.kind) is Annotated else self.kind

    @property
    def choices(self) -> tuple[str, ...]:
        """The only values, if they are listed."""
        return typing.get_args(self.kind) if typing.get_origin(self.kind) is Literal else ()

    @property
    def metavar(self) -> str:
        """What stands for a value in the help."""
        if self.choices:
            return "|".join(self.choices)
        if self.name.endswith("_bytes"):
            return "SIZE"
        if self.name.endswith("_s"):
            return "SECONDS"
        if typing.get_origin(self.plain) is tuple:
            return "A,B,..."
        return _METAVARS.get(self.plain, "VALUE")

    def read(self, value: object, source: str) -> object:
        """The value as the Struct holds it. Raises SettingsError naming the source."""
        try:
            return self._converted(value)
        except (msgspec.ValidationError, ValueError) as error:
            expected = f"one of {', '.join(self.choices)}" if self.choices else self.metavar
            raise SettingsError(f"{source}: {value!r} is not {expected} ({error})") from None

    def _converted(self, value: object) -> object:
        if not isinstance(value, str):
            return msgspec.convert(value, self.kind)
        if self.optional and value.lower() in ("none", "null", ""):
            return None
        given: object = value
        if self.name.endswith("_bytes"):
            given = parse_size(value)
        elif typing.get_origin(self.plain) is tuple:
            given = [part.strip() for part in value.split(",") if part.strip()]
        elif self.plain is bool:
            given = {"yes": True, "no": False, "on": True, "off": False}.get(value.lower(), value)
        return msgspec.convert(given, self.kind, strict=False)


def parse_size(text: str) -> int:
    """Bytes of "512", "64 MB" (10^6) or "2GiB" (2^30). Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match["unit"].lower() not in _UNITS:
        raise ValueError("a size is a number and a unit such as MB or GiB")
    return int(float(match["number"]) * _UNITS[match["unit"].lower()])


def all_options() -> dict[str, Option]:
    """Every setting by name, in the order of the Structs."""
    return {option.name: option for section in SECTIONS for option in options_of(section)}


def options_of(section: str) -> list[Option]:
    """The settings of one section."""
    struct = SECTIONS[section]
    helps = _helps(struct)
    found = []
    for field in msgspec.structs.fields(struct):
        kind, optional = _without_none(field.type)
        found.append(
            Option(
                section=section,
                name=field.name,
                kind=kind,
                optional=optional,
                default=COMMAND_LINE_DEFAULTS.get(field.name, field.default),
                help=helps.get(field.name, ""),
            )
        )
    return found


def _without_none(kind: object) -> tuple[object, bool]:
    if typing.get_origin(kind) not in (types.UnionType, typing.Union):
        return kind, False
    (part,) = (part for part in typing.get_args(kind) if part is not type(None))
    return part, True


def _helps(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The Attributes section of a docstring, an entry a field."""
    _, _, attributes = inspect.cleandoc(struct.__doc__ or "").partition("Attributes:")
    return {name: " ".join(text.split()) for name, text in _ENTRY.findall(attributes + "\n")}


def toml_value(value: object) -> str:
    """A value as a settings file has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return repr(value)  # inf and nan are TOML's words too
