"""Chooses how steps overlap, by measuring whether launching ahead copies KV.

MLX writes into a buffer in place only when nothing else holds it, and every input of a kernel is held until its command
buffer has finished. A step encoded while the one before still runs therefore copies the KV that attention is reading,
unless encoding lags far enough behind. Whether that happens depends on backend, model and buffer sizes, so a few steps
are launched both ways on buffers of real size, and the peak memory tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from .kv.pages import leaf_caches
from .kv.shapes import KVShape, leaves
from .kv.staged import StagedRow
from .mlxlm import KVCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from .kv.batch import Batch
    from .kv.shapes import LayerShape

PROBE_TOKENS = 1024
PROBE_ROWS = 2
PROBE_STEPS = 4
PROBE_BYTES = 512 << 20
COPY_SHARE = 0.5
"""A peak this share of one layer's KV above build-ahead's means that layers were copied."""


class Overlap(NamedTuple):
    """The way ("launch", "build" or "off") and the measurement behind it."""

    mode: str
    reason: str


def choose_overlap(
    setting: str, model: Any, shapes: list[LayerShape] | None, new_batch: Callable[[], Batch]
) -> Overlap:
    """Take the setting, or measure when it is "auto".

    Args:
        setting: "auto", "launch", "build" or "off".
        model: mlx-lm's.
        shapes: layers of a batched layout; None (row-by-row) is not measured and builds ahead.
        new_batch: makes an empty batch.
    """
    if setting != "auto":
        return Overlap(setting, "as set")
    layers = [] if shapes is None else [s for s in leaves(shapes) if isinstance(s, KVShape) and s.window is None]
    if not layers:
        return Overlap("build", "no batched KV to measure")
    tokens = max(64, min(PROBE_TOKENS, PROBE_BYTES // (PROBE_ROWS * sum(s.token_bytes for s in layers))))
    layer_bytes = max(s.token_bytes for s in layers) * PROBE_ROWS * tokens
    ahead = _peak_bytes(model, new_batch(), tokens, ahead=True)
    behind = _peak_bytes(model, new_batch(), tokens, ahead=False)
    extra = ahead - behind
    copied = extra > COPY_SHARE * layer_bytes
    reason = f"launching ahead peaked {extra / 2**20:+.1f} MiB beside {layer_bytes / 2**20:.1f} MiB of KV a layer"
    return Overlap("build" if copied else "launch", reason)


def _peak_bytes(model: Any, batch: Batch, tokens: int, *, ahead: bool) -> int:
    """Peak memory over the level before, of a few steps on rows of `tokens` zero keys."""
    for row in range(PROBE_ROWS):
        batch.join(row, _blank(model, tokens))
    last = mx.zeros((len(batch.order), 1), mx.int32)
    mx.eval(batch.arrays())
    for warm in (True, False):
        if not warm:
            mx.reset_peak_memory()
        base = mx.get_active_memory()
        for _ in range(PROBE_STEPS):
            following = mx.argmax(batch.forward(last)[:, -1:], axis=-1).astype(mx.int32)
            if not ahead:
                mx.eval(last)
            mx.async_eval(following, *batch.recurrent_arrays())
            if ahead:
                mx.eval(last)
            last = following
        mx.eval(last)
    return mx.get_peak_memory() - base


def _blank(model: Any, tokens: int) -> StagedRow:
    """A staged row whose KV is zeros, as if `tokens` tokens had been prefilled."""
    staged = StagedRow(model)
    staged.append([0])
    for cache in leaf_caches(staged.caches):
        if isinstance(cache, KVCache):
            cache.keys = mx.zeros((1, cache.keys.shape[1], tokens, cache.keys.shape[3]), cache.keys.dtype)
            cache.values = mx.zeros((1, cache.values.shape[1], tokens, cache.values.shape[3]), cache.values.dtype)
            cache.offset = tokens
    staged.length = tokens
    return staged
