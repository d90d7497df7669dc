"""What the facade needs of the prefix cache: the root of its keys, its folder, namespaces, and warm-up."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from . import disk
from .errors import InvalidRequest
from .generation import Generation

if TYPE_CHECKING:
    from .config import RuntimeConfig
    from .disk import FolderReport
    from .loading import LoadedEngine

FORMAT = "pages-1"
"""Changes when stored pages mean something else."""


def cache_root(config: RuntimeConfig, loaded: LoadedEngine) -> str:
    """Hex digits that name what pages depend on: weights, cache kinds, page form, numerics of the libraries."""
    facts = loaded.facts
    parts = (
        FORMAT,
        loaded.fingerprint,
        str(config.page_tokens),
        str(facts.page_bytes),
        str(facts.checkpoint_bytes),
        metadata.version("mlx"),
        metadata.version("mlx-lm"),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def cache_folder(name: str) -> Path:
    """Where pages lie on disk; an empty name is the user's cache folder."""
    from .models.cache_folder import default_cache_folder

    return Path(name).expanduser() if name else default_cache_folder() / "prefixes"


class PrefixFolder:
    """What commands do with the pages on disk, from outside any server."""

    def __init__(self, name: str) -> None:
        self._top = cache_folder(name)

    def reports(self) -> list[FolderReport]:
        """See `disk.reports`."""
        return disk.reports(self._top)

    def verify(self) -> list[FolderReport]:
        """See `disk.verify`."""
        return disk.verify(self._top)

    def clear(self) -> tuple[int, list[FolderReport]]:
        """See `disk.clear`."""
        return disk.clear(self._top)


def namespace(config: RuntimeConfig, generation: Generation) -> str:
    """Whose prefixes a request shares: one name per pair of salts, empty without any. Salts are not kept in clear."""
    salts = (config.cache_salt, generation.cache_salt)
    if not any(salts):
        return ""
    return hashlib.blake2b(msgspec.msgpack.encode(salts), digest_size=16).hexdigest()


async def read_warm_prompts(path: str) -> list[Generation]:
    """The prefixes of a warm-up file, each as a request for one token.

    Raises:
        InvalidRequest: it cannot be read, or a line is none of: a string, a list of token ids, {"messages": [...]}.
    """
    try:
        text = await anyio.Path(path).expanduser()
        lines = (await text.read_text(encoding="utf-8")).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the warm-up file cannot be read: {error}", param="warm_prompts") from error
    return [_warm(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]


def _warm(line: str, place: str) -> Generation:
    try:
        value: Any = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{place}: {error}", param="warm_prompts") from error
    match value:
        case str():
            return Generation(prompt=value, max_tokens=1)
        case [int(), *_]:
            return Generation(tokens=tuple(value), max_tokens=1)
        case {"messages": [_, *_] as messages}:
            return Generation(messages=tuple(messages), max_tokens=1)
    raise InvalidRequest(
        f'{place}: a prefix is a string, a list of token ids, or {{"messages": [...]}}', param="warm_prompts"
    )
