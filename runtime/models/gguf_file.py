"""Read a GGUF file without trusting a single number in it.

The `gguf` package's reader walks whatever counts and lengths the file claims, and makes one Python object
per array element (25 s and 3 GB for a vocabulary of 262,144). This one checks every length against the
bytes that are left, reads arrays of numbers in one go and maps the tensor data, never copying it.

Invariants: any file gives a `GgufFile` or an `InvalidModel`; what is allocated is bounded by the file's
size; every tensor lies inside the file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from .errors import InvalidModel, ModelNotFound, UnsupportedModel

if TYPE_CHECKING:
    from pathlib import Path

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 16
"""Most metadata keys, and most tensors."""
MAX_ARRAY = 1 << 23
"""Most elements of one metadata array; the largest vocabularies and merge lists have a tenth of it."""
MAX_NAME_BYTES = 1 << 16
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""Metadata type number and its numpy type; 7 is a boolean byte."""

Bytes = npt.NDArray[np.uint8]


class GgufTensor(msgspec.Struct, frozen=True):
    """Where one tensor lies.

    Attributes:
        name: its name in the file.
        shape: outermost dimension first, as numpy and MLX have it.
        block_type: how its rows are encoded.
        offset: of its first byte in the file.
        row_bytes: encoded bytes of one row (the innermost dimension).
    """

    name: str
    shape: tuple[int, ...]
    block_type: GGMLQuantizationType
    offset: int
    row_bytes: int

    @property
    def rows(self) -> int:
        """Number of rows: the product of all dimensions but the innermost."""
        return math.prod(self.shape[:-1])


class GgufFile:
    """Metadata and mapped tensors of one file. Not tied to a thread."""

    def __init__(self, path: Path) -> None:
        """Parse the header. Raises `ModelNotFound`, `InvalidModel` or `UnsupportedModel`."""
        self.path = path
        self._data = _map(path)
        cursor = _Cursor(path, self._data)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._parse(cursor)

    def _parse(self, cursor: _Cursor) -> None:
        if cursor.take(4).tobytes() != MAGIC:
            raise cursor.invalid("it does not start with 'GGUF'")
        version = cursor.scalar(4)
        if version not in SUPPORTED_VERSIONS:
            raise UnsupportedModel(
                f"{self.path} is GGUF version {version} (or big-endian); versions 2 and 3, little-endian, "
                "are supported. Convert it again with a current llama.cpp."
            )
        tensor_count, key_count = cursor.count(MAX_ENTRIES, "tensors"), cursor.count(MAX_ENTRIES, "metadata keys")
        for _ in range(key_count):
            key = cursor.string(MAX_NAME_BYTES)
            if key in self.metadata:
                raise cursor.invalid(f"the key {key!r} is there twice")
            self.metadata[key] = cursor.value(cursor.scalar(4))
        entries = [_tensor_entry(cursor) for _ in range(tensor_count)]
        start = _aligned(cursor.position, self._alignment(cursor))
        for entry in entries:
            self._add(cursor, entry, start)
        self.header_bytes = start

    def _alignment(self, cursor: _Cursor) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise cursor.invalid(f"general.alignment is {alignment!r}, not a power of two")
        return alignment

    def _add(self, cursor: _Cursor, entry: _Entry, start: int) -> None:
        if entry.name in self.tensors:
            raise cursor.invalid(f"the tensor {entry.name!r} is there twice")
        tensor = _locate(cursor, entry, start)
        if tensor.offset + tensor.rows * tensor.row_bytes > len(self._data):
            raise cursor.invalid(f"tensor {entry.name!r} {entry.shape} reaches beyond the end of the file")
        self.tensors[entry.name] = tensor

    @property
    def size_bytes(self) -> int:
        """Size of the whole file in bytes."""
        return len(self._data)

    def rows(self, tensor: GgufTensor) -> Bytes:
        """The encoded rows of `tensor`: uint8 [rows, row_bytes], mapped, read-only."""
        count = tensor.rows * tensor.row_bytes
        data = self._data[tensor.offset : tensor.offset + count]
        return data.reshape(tensor.rows, tensor.row_bytes)

    def bytes_at(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes of the file from `offset`."""
        return self._data[offset : offset + count].tobytes()


class _Entry(msgspec.Struct, frozen=True):
    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int


class _Cursor:
    """A position in the mapped file; every read is checked against the end."""

    def __init__(self, path: Path, data: Bytes) -> None:
        self.path, self._data = path, data
        self.position = 0

    def invalid(self, reason: str) -> InvalidModel:
        return InvalidModel(f"{self.path} is not a sound GGUF file: {reason}. Download it again or use another file.")

    def take(self, count: int) -> Bytes:
        if count > len(self._data) - self.position:
            raise self.invalid(f"{count} bytes are announced at byte {self.position}, beyond its end")
        taken = self._data[self.position : self.position + count]
        self.position += count
        return taken

    def scalar(self, kind: int) -> Any:
        number = np.frombuffer(self.take(np.dtype(SCALARS[kind]).itemsize), SCALARS[kind])[0].item()
        return bool(number) if kind == BOOL else number

    def count(self, most: int, what: str) -> int:
        number: int = self.scalar(10)
        if number > most:
            raise self.invalid(f"it claims {number} {what}, more than {most}")
        return number

    def string(self, most_bytes: int | None = None) -> str:
        length: int = self.scalar(10)
        if most_bytes is not None and length > most_bytes:
            raise self.invalid(f"a name of {length} bytes at byte {self.position}")
        return self.take(length).tobytes().decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.scalar(kind)
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array()
        raise self.invalid(f"metadata of unknown type {kind}")

    def _array(self) -> list[str] | npt.NDArray[Any]:
        kind, length = self.scalar(4), self.count(MAX_ARRAY, "array elements")
        if kind in SCALARS:
            numbers = np.frombuffer(self.take(length * np.dtype(SCALARS[kind]).itemsize), SCALARS[kind])
            return numbers.astype(bool) if kind == BOOL else numbers.copy()
        if kind == STRING:
            return self._strings(length)
        raise self.invalid(f"an array of unsupported element type {kind}")

    def _strings(self, length: int) -> list[str]:
        """The hot loop of a large vocabulary: no helper calls, checks kept."""
        if length * 8 > len(self._data) - self.position:
            raise self.invalid(f"{length} strings are announced at byte {self.position}, beyond its end")
        view, position, end = self._data.data, self.position, len(self._data)
        unpack = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        for _ in range(length):
            start = position + 8
            position = start + unpack(view, position)[0] if start <= end else end + 1
            if position > end:
                raise self.invalid("a string reaches beyond its end")
            strings.append(str(view[start:position], "utf-8", "replace"))
        self.position = position
        return strings


def _map(path: Path) -> Bytes:
    try:
        if path.stat().st_size == 0:
            raise InvalidModel(f"{path} is empty. Download it again.")
        return np.memmap(path, mode="r", dtype=np.uint8)
    except FileNotFoundError as error:
        raise ModelNotFound(f"{path} does not exist. Check the path.") from error
    except (OSError, ValueError) as error:
        raise InvalidModel(f"{path} cannot be read: {error}. Check the path and its permissions.") from error


def _tensor_entry(cursor: _Cursor) -> _Entry:
    name = cursor.string(MAX_NAME_BYTES)
    dimensions = cursor.scalar(4)
    if not 0 < dimensions <= MAX_DIMENSIONS:
        raise cursor.invalid(f"tensor {name!r} has {dimensions} dimensions")
    innermost_first = [cursor.scalar(10) for _ in range(dimensions)]
    return _Entry(name, tuple(reversed(innermost_first)), cursor.scalar(4), cursor.scalar(10))


def _locate(cursor: _Cursor, entry: _Entry, start: int) -> GgufTensor:
    try:
        block_type = GGMLQuantizationType(entry.type_number)
        block_elements, block_bytes = GGML_QUANT_SIZES[block_type]
    except (ValueError, KeyError):
        raise UnsupportedModel(
            f"{cursor.path}: tensor {entry.name!r} has the unknown block type {entry.type_number}. "
            "Use a file quantised as Q4_0, Q4_1, Q8_0, Q4_K_M, Q5_K_M, Q6_K, F16 or BF16."
        ) from None
    if 0 in entry.shape or entry.shape[-1] % block_elements:
        raise cursor.invalid(f"tensor {entry.name!r} {entry.shape} does not fit blocks of {block_elements}")
    row_bytes = entry.shape[-1] // block_elements * block_bytes
    return GgufTensor(entry.name, entry.shape, block_type, start + entry.offset, row_bytes)


def _aligned(position: int, alignment: int) -> int:
    return position + -position % alignment
