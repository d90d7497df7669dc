"""Write a safetensors file row by row, without holding the model in memory.

Format: https://github.com/huggingface/safetensors#format (8 bytes of header length, JSON, tensor data).
The same tensors in the same order give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

BYTES_PER_ELEMENT = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4}
ALIGNMENT = 64


class TensorSlot(msgspec.Struct, frozen=True):
    """One tensor of the file to be written.

    Attributes:
        name: its name.
        dtype: "F32", "F16", "BF16" or "U32".
        shape: its dimensions.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * BYTES_PER_ELEMENT[self.dtype]


class SafetensorsWriter:
    """A file whose tensors are filled from the first row to the last, several of them side by side.

    Use as a context manager. One thread at a time. Leaves `OSError` to the caller.
    """

    def __init__(self, path: Path, slots: list[TensorSlot]) -> None:
        self._slots = {slot.name: slot for slot in slots}
        header, self._positions = _header(slots)
        self._written = dict.fromkeys(self._slots, 0)
        self._digests = {name: hashlib.sha256() for name in self._slots}
        self._file: BinaryIO = path.open("wb")
        self._file.write(header)

    def append(self, name: str, values: npt.NDArray[Any]) -> None:
        """Append rows to tensor `name`; `values` already has the bytes of its dtype."""
        data = np.ascontiguousarray(values).data.cast("B")
        slot, written = self._slots[name], self._written[name]
        if written + len(data) > slot.size_bytes:
            raise ValueError(f"more data than {slot} holds")
        self._file.seek(self._positions[name] + written)
        self._file.write(data)
        self._digests[name].update(data)
        self._written[name] = written + len(data)

    def digests(self) -> dict[str, str]:
        """The SHA-256 of each tensor's data; `ValueError` when one is not complete."""
        missing = [name for name, slot in self._slots.items() if self._written[name] != slot.size_bytes]
        if missing:
            raise ValueError(f"tensors not written to their end: {missing[:3]}")
        return {name: digest.hexdigest() for name, digest in self._digests.items()}

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _header(slots: list[TensorSlot]) -> tuple[bytes, dict[str, int]]:
    """The file's head, and where each tensor's data starts in the file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offsets: dict[str, int] = {}
    position = 0
    for slot in slots:
        offsets[slot.name] = position
        entries[slot.name] = {
            "dtype": slot.dtype,
            "shape": list(slot.shape),
            "data_offsets": [position, position + slot.size_bytes],
        }
        position += slot.size_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + offset for name, offset in offsets.items()}
