"""Weights in pieces: how much they will take, and evaluating them without keeping the device from others for long."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .spec import ModelSpec

PIECE_BYTES = 64 << 20
Q4_SHARE, Q8_SHARE = 0.3, 0.55
"""Of 16-bit weights: 4 or 8 bits each, and a scale and a bias for 64."""

Evaluated = Callable[[int, int], None]
"""Bytes done, bytes in all."""


def ignore(done: int, total: int) -> None:
    """For callers that do not care."""


def evaluate(parameters: Iterable[tuple[str, Any]], evaluated: Evaluated) -> None:
    """Bring lazily loaded arrays into memory, PIECE_BYTES at a time. On the MLX thread."""
    import mlx.core as mx

    arrays = [value for _, value in parameters]
    total = sum(value.nbytes for value in arrays)
    done = 0
    piece: list[Any] = []
    for value in arrays:
        piece.append(value)
        size = sum(part.nbytes for part in piece)
        if size >= PIECE_BYTES:
            mx.eval(piece)
            piece = []
            done += size
            evaluated(done, total)
    if piece:
        mx.eval(piece)
        evaluated(total, total)


def resident_bytes(spec: ModelSpec) -> int:
    """About what the weights of a model will take in memory, by its files."""
    stored = sum(path.stat().st_size for path in spec.path.glob("*.safetensors"))
    if spec.quantize is not None:
        return int(stored * (Q4_SHARE if spec.quantize == "q4" else Q8_SHARE))
    return stored * 2 if spec.cpu_float32 else stored
