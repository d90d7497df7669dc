"""One forward over several length classes: projections see all rows, attention runs class by class.

The layers here stand in for a model's caches. What they return in place of keys and values only the attention seam
understands; a model that touches keys between cache and attention (MLA) cannot take this way and gets one forward per
class instead, which `probe` finds out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..device import backend
from ..kernels.softmax_cpu import softmax_attention, softmax_fits
from ..kernels.step_attention_cpu import step_attention, step_fits
from ..mlxlm import solo_attention
from .deferred import DeferredMask, RaggedKV

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .group import RowGroup
    from .stores import KVRows


class SplitKV:
    """One attention layer over all classes; its own stand-in for keys and values."""

    def __init__(self, parts: Sequence[KVRows], bounds: Sequence[slice]) -> None:
        self.parts = list(zip(parts, bounds, strict=True))
        self.offset = mx.array(0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[SplitKV, SplitKV]:
        """Write each class's share of (rows, heads, tokens, size)."""
        for part, bound in self.parts:
            part.update_and_fetch(keys[bound], values[bound])
        return self, self

    def keys_and_values(self) -> tuple[SplitKV, SplitKV]:
        """For layers that borrow this one's."""
        return self, self

    def make_mask(self, tokens: int, return_array: bool = False, window_size: int | None = None) -> DeferredMask:
        """A stand-in; the seam asks each class for its own."""
        del tokens, return_array
        return DeferredMask(window_size)

    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """Attention of (rows, heads, tokens, size) queries, each class over its own keys."""
        window = mask.window if isinstance(mask, DeferredMask) else None
        out = []
        for part, bound in self.parts:
            keys, values = part.keys_and_values()
            own = part.make_mask(queries.shape[2], window_size=window)
            out.append(attention(queries[bound], keys, values, None, scale, own, sinks))
        return mx.concatenate(out, axis=0)


def attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """The one seam: attention as mlx-lm's model modules call it. What is not ours falls through to mlx-lm."""
    if isinstance(keys, SplitKV | RaggedKV):
        return keys.attend(queries, scale, mask, sinks)
    if softmax_fits(queries, keys, mask, sinks) and backend() == "cpu":
        return softmax_attention(queries, keys, values, scale, mask)
    if step_fits(queries, keys, mask, sinks) and backend() == "cpu":
        return step_attention(queries, keys, values, scale, mask)
    return solo_attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


class SplitLayers:
    """The stand-in cache list for a set of groups; rebuilt when groups or their slots change.

    Args:
        groups: at least two, none with recurrent layers or nested caches.
    """

    def __init__(self, groups: Sequence[RowGroup]) -> None:
        self.groups = list(groups)
        self.sizes = [len(group.rows) for group in groups]
        bounds, low = [], 0
        for size in self.sizes:
            bounds.append(slice(low, low + size))
            low += size
        self.layers = [SplitKV(parts, bounds) for parts in zip(*(group.layers for group in groups), strict=True)]

    def fits(self, groups: Sequence[RowGroup]) -> bool:
        """Whether this still describes `groups`."""
        return self.groups == list(groups) and self.sizes == [len(group.rows) for group in groups]

    def begin(self, tokens: int) -> None:
        """Prepare a forward of `tokens` tokens a row in every group."""
        views = [group.begin(tokens) for group in self.groups]
        self.set_offset(mx.concatenate([view.offset for view in views]))

    def set_offset(self, offset: mx.array) -> None:
        """Positions of the next tokens, int32 (places,)."""
        for layer in self.layers:
            layer.offset = offset
