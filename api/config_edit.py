"""Settings put into other programs' files, and taken out again. Pure: texts in, texts out.

Every edit is checked by parsing: the new text must mean the old one plus our settings and nothing else, or it is
refused. JSON is written anew, key by key; TOML and YAML keep every line, comments included, and ours stand between two
marks, with the lines they replaced beside them.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from .edits import EditRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Values = Mapping[tuple[str, ...], Any]

BEGIN, END, WAS = "# >>> mlx-troupe", "# <<< mlx-troupe", "# was: "
MAX_ALIASES = 100


class ConfigEdit(Protocol):
    """One file's edit. Both methods raise EditRefused."""

    def apply(self, text: str | None) -> str:
        """The text with our settings; None is no file."""
        ...

    def undo(self, text: str, original: str | None) -> str | None:
        """The text without them, and with what `original` had in their place; None when no file is left.

        `original` is what `apply` got. The text may have changed since; if it has not, this gives it back exactly.
        """
        ...


class JsonEdit:
    """Keys of a JSON object.

    Args:
        values: by path.
    """

    def __init__(self, values: Values) -> None:
        self._values = values

    def apply(self, text: str | None) -> str:
        """See ConfigEdit."""
        document = _json(text)
        for path, value in self._values.items():
            _put(document, path, value)
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"

    def undo(self, text: str, original: str | None) -> str | None:
        """See ConfigEdit."""
        document, before = _json(text), _json(original)
        for path in self._values:
            _restore(document, before, path)
        if document == before:
            return original
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


class BlockEdit:
    """Lines between marks in a text whose comments begin with `#`.

    Args:
        parse: the text's meaning; raises ValueError.
        insert: the text with our lines.
        meaning: what the result must mean, given what the text meant.
    """

    def __init__(
        self,
        parse: Callable[[str], dict[str, Any]],
        insert: Callable[[str], str],
        meaning: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self._parse = parse
        self._insert = insert
        self._meaning = meaning

    def apply(self, text: str | None) -> str:
        """See ConfigEdit."""
        old = text or ""
        expected = self._meaning(copy.deepcopy(self._read(old)))
        new = self._insert(old)
        if self._read(new, "cannot be edited safely: ") != expected:
            raise EditRefused("cannot be edited safely: its form is unusual")
        return new

    def undo(self, text: str, original: str | None) -> str | None:
        """See ConfigEdit."""
        kept = without_blocks(text)
        if self._read(kept, "cannot be undone safely: ") == self._read(original or "") and kept != text:
            return original
        return kept if kept.strip() or original is not None else None

    def _read(self, text: str, problem: str = "") -> dict[str, Any]:
        try:
            return self._parse(text)
        except (ValueError, RecursionError) as error:
            raise EditRefused(problem + " ".join(str(error).split())[:300]) from None


def without_blocks(text: str) -> str:
    """The text without our lines, those that they replaced back in their place. Raises EditRefused."""
    kept: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        if bare == BEGIN:
            if inside:
                raise EditRefused("its mlx-troupe marks do not match")
            inside = True
        elif bare == END:
            if not inside:
                raise EditRefused("its mlx-troupe marks do not match")
            inside = False
        elif not inside:
            kept.append(line)
        elif bare.startswith(WAS):
            kept.append(line.lstrip().removeprefix(WAS))
    if inside:
        raise EditRefused("its mlx-troupe marks do not match")
    return "".join(kept)


def toml_edit(top: Mapping[str, str], table: Sequence[str], values: Mapping[str, str]) -> BlockEdit:
    """Keys of the root, and one table at the end."""

    def insert(text: str) -> str:
        head, replaced = _without_keys(text, top, r"\s*=", until=r"\s*\[")
        first = _block([*(f"{name} = {_quoted(value)}" for name, value in top.items())], replaced)
        last = _block([f"[{'.'.join(table)}]", *(f"{name} = {_quoted(value)}" for name, value in values.items())])
        return first + _ended(head) + last

    def meaning(document: dict[str, Any]) -> dict[str, Any]:
        _put(document, tuple(table), dict(values))
        return document | dict(top)

    return BlockEdit(tomllib.loads, insert, meaning)


def yaml_edit(values: Mapping[str, str]) -> BlockEdit:
    """Keys of the root."""

    def insert(text: str) -> str:
        kept, replaced = _without_keys(text, values, r"\s*:(\s|$)")
        return _ended(kept) + _block([f"{name}: {_quoted(value)}" for name, value in values.items()], replaced)

    return BlockEdit(parse_yaml, insert, lambda document: document | dict(values))


def yaml_item_edit(key: str, item: Mapping[str, Any], root: Mapping[str, str]) -> BlockEdit:
    """A first item in a list of the root; `root` is for a file that does not exist."""

    def lines(indent: str) -> list[str]:
        shown = [f"{name}: {_quoted(value)}" for name, value in item.items()]
        return [f"{indent}{'- ' if place == 0 else '  '}{line}" for place, line in enumerate(shown)]

    def insert(text: str) -> str:
        opening = re.search(rf"^{re.escape(key)}:[ \t]*(#.*)?$\n?", text, re.MULTILINE)
        if opening is None:
            header = [f"{name}: {_quoted(value)}" for name, value in root.items()] if not text.strip() else []
            return _ended(text) + _block([*header, f"{key}:", *lines("  ")])
        rest = text[opening.end() :]
        following = re.match(r"(?:[ \t]*(?:#.*)?\n)*([ ]*)- ", rest)
        indent = following.group(1) if following is not None else "  "
        return _ended(text[: opening.end()]) + _block(lines(indent), indent=indent) + rest

    def meaning(document: dict[str, Any]) -> dict[str, Any]:
        found = document if document else dict(root)
        others = found.get(key) or []
        if not isinstance(others, list):
            raise EditRefused(f"its {key} is not a list")
        return found | {key: [dict(item), *others]}

    return BlockEdit(parse_yaml, insert, meaning)


def parse_yaml(text: str) -> dict[str, Any]:
    """A YAML mapping without what could expand. Raises ValueError."""
    try:
        aliases = sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader))
        if aliases > MAX_ALIASES:
            raise ValueError("it holds too many YAML aliases")
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError("not a YAML mapping")
    return found


def _json(text: str | None) -> dict[str, Any]:
    if text is None or not text.strip():
        return {}
    try:
        found = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise EditRefused(f"not plain JSON, perhaps with comments: {error}") from None
    if not isinstance(found, dict):
        raise EditRefused("not a JSON object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def _put(document: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    for name in path[:-1]:
        document = document.setdefault(name, {})
        if not isinstance(document, dict):
            raise EditRefused(f"its {name!r} is not an object")
    document[path[-1]] = value


def _restore(document: dict[str, Any], before: Mapping[str, Any], path: tuple[str, ...]) -> None:
    """Give one path the value it had, or take it away, with the objects that only it needed."""
    name, rest = path[0], path[1:]
    if not rest:
        if name in before:
            document[name] = before[name]
        else:
            document.pop(name, None)
        return
    inner = document.get(name)
    if not isinstance(inner, dict):
        return
    known = before.get(name)
    _restore(inner, known if isinstance(known, dict) else {}, rest)
    if not inner and name not in before:
        del document[name]


def _without_keys(text: str, names: Mapping[str, str], tail: str, until: str | None = None) -> tuple[str, list[str]]:
    """The text without the root's lines that set the names, and those lines."""
    pattern = re.compile(rf"({'|'.join(map(re.escape, names))}){tail}")
    kept, replaced = [], []
    in_root = True
    for line in text.splitlines(keepends=True):
        in_root = in_root and not (until is not None and re.match(until, line))
        if in_root and pattern.match(line):
            replaced.append(line.rstrip("\r\n"))
        else:
            kept.append(line)
    return "".join(kept), replaced


def _block(lines: Sequence[str], replaced: Sequence[str] = (), indent: str = "") -> str:
    marked = [indent + BEGIN, *lines, *(WAS + line for line in replaced), indent + END]
    return "\n".join(marked) + "\n"


def _ended(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"


def _quoted(value: object) -> str:
    """A value as JSON, which TOML and YAML read alike; lists of words stay on one line."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
