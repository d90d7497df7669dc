"""API keys: who may ask. Several, each with a name that goes to logs and limits; the keys themselves go nowhere.

They come from a file or the environment, never from the command line, which every user of a machine can read. One a
line (or between commas), `name:key` or the key alone; `#` begins a comment.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path
from typing import TYPE_CHECKING

from .options import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

KEYS_VARIABLE = "MLX_TROUPE_API_KEYS"
MIN_KEY_CHARACTERS = 8
MAX_KEY_CHARACTERS = 512
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[\x21-\x7e]+")


class ApiKeys:
    """The keys of one server; without any, everybody may ask.

    Args:
        entries: pairs of name and key. Raises SettingsError for keys or names that cannot be used.
    """

    def __init__(self, entries: Iterable[tuple[str, str]] = ()) -> None:
        self._digests: list[tuple[str, bytes]] = []
        for name, key in entries:
            if not _NAME.fullmatch(name) or name in (known for known, _ in self._digests):
                raise SettingsError(f"API keys: the name {name[:64]!r} cannot be used, or is used twice")
            if not MIN_KEY_CHARACTERS <= len(key) <= MAX_KEY_CHARACTERS or not _KEY.fullmatch(key):
                raise SettingsError(
                    f"API keys: the key of {name} must be {MIN_KEY_CHARACTERS} or more visible characters"
                )
            self._digests.append((name, _digest(key)))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __len__(self) -> int:
        return len(self._digests)

    def owner(self, name: str) -> str:
        """What stands for a key where things of one are kept from others: a digest of name and key.

        Of both, since a name may pass to another key, above all one that only says a key's place in the file. Empty
        for names of no key.
        """
        known = next((digest for found, digest in self._digests if found == name), None)
        return "" if known is None else hashlib.sha256(name.encode() + b"\0" + known).hexdigest()

    def name_of(self, presented: str) -> str | None:
        """Whose key this is, None for nobody's. Takes the same time whichever key comes how close."""
        digest = _digest(presented)
        found: str | None = None
        for name, known in self._digests:
            if hmac.compare_digest(digest, known):
                found = name
        return found


def presented_key(headers: Mapping[str, str]) -> str | None:
    """The key in a request's headers: OpenAI's `Authorization: Bearer`, or Anthropic's `x-api-key`."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("X-Api-Key") or None


def load_keys(path: str | None, environment: Mapping[str, str]) -> ApiKeys:
    """Keys of the file, then of the environment. Raises SettingsError for a file that cannot be read or holds none."""
    entries: list[tuple[str, str]] = []
    if path is not None:
        try:
            entries += _parsed(Path(path).read_text(encoding="utf-8").splitlines(), len(entries))
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"api_key_file {path}: {error}") from None
        if not entries:
            raise SettingsError(f"api_key_file {path} holds no key")
    entries += _parsed(environment.get(KEYS_VARIABLE, "").split(","), len(entries))
    return ApiKeys(entries)


def _parsed(lines: Iterable[str], known: int) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for line in lines:
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, colon, key = text.partition(":")
        found.append((name.strip(), key.strip()) if colon else (f"key{known + len(found) + 1}", text))
    return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
