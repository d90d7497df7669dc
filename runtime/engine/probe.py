"""Finds out, at start, which row layout a model's code can take: measured on the model, not guessed from its name.

Three rows of different lengths are decoded for a few steps in the batch and alone; logits must agree. mlx-lm's models
differ in what they do with a cache (integer offsets, keys touched between cache and attention, masks of their own),
and they change between versions; a wrong guess would be a wrong answer.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np

from .device import backend
from .kv.batch import RowBatch
from .kv.shapes import LayerShape, UnbatchableCache, learn_shapes
from .kv.solo import SoloBatch
from .kv.split import attention
from .kv.staged import StagedRow
from .kv.together import Piece, can_share, extend_together
from .mlxlm import bind_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    from .kernels import RaggedAttention
    from .kv.batch import Batch, ClassForward

logger = logging.getLogger(__name__)

PROBE_LENGTHS = (2, 5, 11)
PROBE_STEPS = 3
EXACT_ERROR = 1e-3
"""Largest relative difference of logits in float32 (sums run in another order)."""
ROUNDED_ERROR = 0.08
"""The same in 16-bit, where batched and single kernels round differently; a wrong mask gives about 1."""

WayName = Literal["split", "per-class", "row-by-row"]


class Layout(NamedTuple):
    """The chosen way and why; `shapes` is None for row-by-row."""

    way: WayName
    reason: str
    shapes: list[LayerShape] | None
    kernel: RaggedAttention | None = None
    compiled: bool = False
    together: bool = False

    def describe(self) -> str:
        """For logs and metrics: "batched" or "row-by-row: reason"."""
        return "batched" if self.shapes is not None else f"row-by-row: {self.reason}"

    def new_batch(self, model: Any, classes: tuple[int, ...]) -> Callable[[], Batch]:
        """A factory of empty batches of this layout."""
        shapes, way, kernel, compiled = self.shapes, self.way, self.kernel, self.compiled
        if shapes is None or way == "row-by-row":
            return lambda: SoloBatch(model)
        return lambda: RowBatch(model, shapes, classes, way, kernel, compiled=compiled)


def choose_layout(model: Any, kernel: RaggedAttention | None = None) -> Layout:
    """Try the ways from fastest to safest on three short rows. Never raises for a model that runs alone.

    Args:
        model: mlx-lm's.
        kernel: this device's ragged attention, taken when the model's logits agree with it too.
    """
    bind_attention(attention)
    try:
        shapes = learn_shapes(model)
    except UnbatchableCache as error:
        return Layout("row-by-row", str(error), None)
    expected = _decode(model, SoloBatch(model))
    one_class = _difference(model, RowBatch(model, shapes, ()), expected)
    if one_class is not None:
        return Layout("row-by-row", one_class, None)
    ways: tuple[ClassForward, ...] = ("split", "per-class")
    reasons: list[str] = []
    for way in ways:
        fault = _difference(model, RowBatch(model, shapes, (4, 8, 1 << 30), way), expected)
        if fault is None:
            usable, compiled = _usable(kernel, model, shapes, expected, way)
            together = can_share(shapes) and _difference(model, RowBatch(model, shapes, ()), expected, shapes) is None
            return Layout(way, "; ".join(reasons) or "logits agree", shapes, usable, compiled, together)
        reasons.append(f"{way}: {fault}")
    return Layout("row-by-row", "; ".join(reasons), None)


def _usable(
    kernel: RaggedAttention | None,
    model: Any,
    shapes: list[LayerShape],
    expected: list[mx.array],
    way: ClassForward,
) -> tuple[RaggedAttention | None, bool]:
    """The kernel, if logits agree with it, and whether they also do in a compiled step."""
    if kernel is None:
        return None, False
    classes = (4, 8, 1 << 30) if way == "split" else ()
    for compiled in (False, True):
        batch = RowBatch(model, shapes, classes, way, kernel, compiled=compiled)
        fault = _difference(model, batch, expected)
        if fault is not None:
            logger.info("%s is not used: %s", "a compiled step" if compiled else "the ragged kernel", fault)
            return (kernel, False) if compiled else (None, False)
    return kernel, backend() != "cpu"


def _difference(
    model: Any, batch: Batch, expected: list[mx.array], together: list[LayerShape] | None = None
) -> str | None:
    """None when the batch's logits agree with those of rows alone, else what is wrong."""
    try:
        found = _decode(model, batch, together)
    except Exception as error:
        logger.debug("layout probe", exc_info=True)
        return f"{type(error).__name__}: {str(error)[:120]}"
    allowed = EXACT_ERROR if found[0].dtype == mx.float32 else ROUNDED_ERROR
    for a, b in zip(found, expected, strict=True):
        x, y = a.astype(mx.float32), b.astype(mx.float32)
        relative = (mx.linalg.norm(x - y, axis=-1) / (mx.linalg.norm(y, axis=-1) + 1e-6)).max()
        apart = float(np.array(relative))
        if not apart <= allowed:
            return f"logits differ by {apart:.3g}, allowed {allowed}"
    return None


def _decode(model: Any, batch: Batch, together: list[LayerShape] | None = None) -> list[mx.array]:
    """Logits (rows, vocabulary) of each step, in row order; prompts computed alone, or together with these shapes."""
    prompts = [[(7 * row + 3 * place) % 50 + 1 for place in range(n)] for row, n in enumerate(PROBE_LENGTHS)]
    rows = [_begun(model, prompt if together is None else prompt[: row * 2]) for row, prompt in enumerate(prompts)]
    if together is not None:
        extend_together(
            model, together, [Piece(row, prompt[row.length :]) for row, prompt in zip(rows, prompts, strict=True)]
        )
    tokens = {row: row + 1 for row in range(len(rows))}
    for row, staged in enumerate(rows):
        batch.join(row, staged)
    out = []
    for step in range(PROBE_STEPS):
        order = batch.order
        logits = batch.forward(mx.array([[0 if row is None else tokens[row] + step] for row in order]))[:, -1]
        places = [order.index(row) for row in range(len(PROBE_LENGTHS))]
        out.append(logits[mx.array(places)])
        mx.eval(out[-1])
    return out


def _begun(model: Any, tokens: list[int]) -> StagedRow:
    staged = StagedRow(model)
    if tokens:
        staged.append(tokens)
    return staged
