"""What the resolver found: a folder ready to be loaded, and what to call it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

Source = Literal["demo", "folder", "gguf", "hub"]
Quantize = Literal["q4", "q8"]


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model on this disk, checked and complete.

    Attributes:
        path: folder with `config.json`, weights and tokenizer.
        name: what the user named: "demo", a hub id, a path.
        served_name: what clients call it.
        source: where it came from.
        revision: commit of a hub model; empty elsewhere.
        quantize: preset applied while loading; None keeps the weights.
        cpu_float32: 16-bit weights become float32 while loading, which a Linux processor needs to be fast.
    """

    path: Path
    name: str
    served_name: str
    source: Source
    revision: str = ""
    quantize: Quantize | None = None
    cpu_float32: bool = False
