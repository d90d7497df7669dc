"""A model's content in 64 hex digits, to keep caches of different weights apart. Fast: no file is read whole.

Fine-tunes of one base have the same configuration, tensor names and sizes, so the middle of every tensor is
sampled as well.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, BinaryIO

from .errors import InvalidModel

if TYPE_CHECKING:
    from pathlib import Path

    from .spec import ModelSpec

SAMPLE_BYTES = 256
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format itself."""


def fingerprint(spec: ModelSpec) -> str:
    """SHA-256 over configuration, weight files' headers and samples, and how they are loaded.

    Raises `InvalidModel` when a weight file is damaged.
    """
    digest = hashlib.sha256(f"{spec.quantize} {spec.cpu_float32}".encode())
    digest.update((spec.path / "config.json").read_bytes())
    for path in sorted(spec.path.glob("model*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            _add_weights(digest, file, path)
    return digest.hexdigest()


def _add_weights(digest: Any, file: BinaryIO, path: Path) -> None:
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise InvalidModel(f"{path} is not a safetensors file. Download the model again.")
    header = file.read(length)
    digest.update(header)
    try:
        entries = json.loads(header)
        spans = sorted(entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__")
        middles = [(int(start) + int(end)) // 2 for start, end in spans]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidModel(f"{path} is not a safetensors file: {error}. Download the model again.") from error
    for middle in middles:
        file.seek(8 + length + middle)
        digest.update(file.read(SAMPLE_BYTES))
