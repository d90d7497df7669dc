"""Typed, bounds-checked access to a GGUF file's metadata."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .errors import InvalidModel

if TYPE_CHECKING:
    from .gguf_file import GgufFile

LARGEST = 1 << 31


class Metadata:
    """Reads the values of one file; every getter raises `InvalidModel` on a wrong type or range."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.architecture = self.text("general.architecture", "")

    def scoped(self, key: str) -> str:
        """`key` below the architecture's own prefix: "llama.block_count"."""
        return f"{self.architecture}.{key}"

    def has(self, key: str) -> bool:
        """Whether `key` is there."""
        return key in self._file.metadata

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = LARGEST) -> int:
        """An integer from `least` to `most`; without `default` it must be there."""
        value = self._get(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self._invalid(key, value, f"an integer from {least} to {most}")
        return value

    def token(self, key: str, vocabulary: int) -> int | None:
        """A token id below `vocabulary`; None when the key is missing or holds no token (-1)."""
        value = self._file.metadata.get(key)
        if value is None or value in (-1, 0xFFFFFFFF):
            return None
        return self.integer(key, least=0, most=vocabulary - 1)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite positive number, shortened from float32 to the decimal it was written from."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self._invalid(key, value, "a positive number")
        return shortest(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._invalid(key, value, "a string")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """A boolean."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._invalid(key, value, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings; it must be there."""
        value = self._get(key, None)
        if not isinstance(value, list):
            raise self._invalid(key, value, "a list of strings")
        return value

    def numbers(self, key: str, count: int) -> npt.NDArray[Any] | None:
        """An array of `count` numbers; None when the key is missing."""
        value = self._file.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise self._invalid(key, value, f"an array of {count} numbers")
        return value

    def _get(self, key: str, default: object) -> Any:
        value = self._file.metadata.get(key, default)
        if value is None:
            raise InvalidModel(f"{self._file.path} lacks the metadata {key!r}. Convert or download it again.")
        return value

    def _invalid(self, key: str, value: object, wanted: str) -> InvalidModel:
        shown = repr(value)
        shown = shown if len(shown) < 80 else f"{shown[:80]}..."
        return InvalidModel(f"{self._file.path}: metadata {key!r} is {shown}, not {wanted}. Use another file.")


def shortest(value: float) -> float:
    """The shortest decimal that float32 rounds to the same number: 9.999999747e-06 becomes 1e-05."""
    with np.errstate(over="ignore"):
        single = np.float32(value)
    return float(str(single)) if float(single) == value else float(value)
