"""What a loaded model takes beside its rows, and how its rows lie: facts for `kv_estimate`. On the MLX thread."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..kv_estimate import KVKind, KVLayout
from .kv.shapes import ArraysShape, KVShape, leaves
from .kv.staged import StagedRow

if TYPE_CHECKING:
    from .kv.shapes import LayerShape

SCORE_COPIES = 2
"""Scores, and their softmax."""
SCORE_BYTES = 4
UNKNOWN_HEADS = 32
PROBE_TOKENS = 64


def kv_layout(model: Any, shapes: list[LayerShape] | None, classes: tuple[int, ...]) -> KVLayout | None:
    """How the rows of a model lie; None when its caches are of kinds that nobody has measured.

    Args:
        model: mlx-lm's.
        shapes: from `learn_shapes`; None for the row-by-row way.
        classes: bounds of the length classes.
    """
    if shapes is None:
        return None
    kinds: Counter[int | None] = Counter()
    state = 0
    for shape in leaves(shapes):
        if isinstance(shape, KVShape):
            kinds[shape.window] += shape.token_bytes
        elif isinstance(shape, ArraysShape):
            state += shape.row_bytes
    return KVLayout(
        kinds=tuple(KVKind(window, size) for window, size in kinds.items()),
        state_bytes=state,
        classes=tuple(classes),
        activation_bytes=_activation_bytes(model),
        score_bytes=float(SCORE_COPIES * SCORE_BYTES * _heads(model)),
    )


def _activation_bytes(model: Any) -> float:
    """Bytes a prompt token at depth 0 needs while it runs: the peak of a short prefill over what it left."""
    staged = StagedRow(model)
    staged.append([0])
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    staged.append([0] * PROBE_TOKENS)
    return max(0, mx.get_peak_memory() - max(before, mx.get_active_memory())) / PROBE_TOKENS


def _heads(model: Any) -> int:
    args = getattr(model, "args", None)
    for holder in (args, getattr(args, "text_config", None)):
        found = holder.get("num_attention_heads") if isinstance(holder, dict) else None
        found = getattr(holder, "num_attention_heads", found)
        if isinstance(found, int) and found > 0:
            return found
    return UNKNOWN_HEADS
