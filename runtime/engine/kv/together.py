"""Short prompts prefilled in one forward: on the left of a shared block, padded, each with its own start.

A burst of short prompts is bound by the number of forwards, not by their tokens (32 prompts of 50 tokens on a small
model: 32 forwards took 70 ms, one takes 12). A row's padding is never seen by its tokens, so its KV is what it would be
alone. Only for caches of KV; recurrent state would take in the padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ..mlxlm import RotatingKVCache
from .group import RowGroup
from .shapes import KVShape, leaves
from .staged import StagedRow, leaf_caches
from .stores import KVRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .shapes import LayerShape

LONGEST_TOGETHER = 512
"""Longer prompts fill the device by themselves."""
MOST_TOKENS = 4096
"""Tokens, padding included, of one forward."""
FREE_PADDING = 256
"""Padding that costs less than another forward."""


def can_share(shapes: list[LayerShape] | None) -> bool:
    """Whether the model's layers keep nothing but KV in shared buffers."""
    return shapes is not None and all(isinstance(shape, KVShape) for shape in leaves(shapes))


def packs(lengths: Sequence[int]) -> list[list[int]]:
    """Which prompts (by index) to compute together, each pack padded by at most a third of its tokens or so.

    Prompts that are left alone form packs of one.
    """
    out: list[list[int]] = []
    pack: list[int] = []
    tokens = longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        block = longest * (len(pack) + 1)
        if pack and block <= min(MOST_TOKENS, (tokens + length) * 4 // 3 + FREE_PADDING):
            pack.append(index)
            tokens += length
            continue
        pack, tokens, longest = [index], length, length
        out.append(pack)
    return out


def prefill_together(model: Any, shapes: list[LayerShape], prompts: Sequence[Sequence[int]]) -> list[StagedRow]:
    """Compute the KV of several prompts in one forward and evaluate it.

    Args:
        model: mlx-lm's.
        shapes: of its layers; see `can_share`.
        prompts: at least one token each.

    Returns:
        One staged row a prompt, in order. They share memory until the last of them is dropped.
    """
    longest = max(map(len, prompts))
    group = RowGroup(shapes, len(prompts))
    lengths = np.array([len(prompt) for prompt in prompts], np.int64)
    # A row's first places are padding: it starts after the cursor and its positions begin below zero.
    group.live[:] = True
    group.lengths = lengths - longest
    for plane in group.planes.values():
        plane.span = lengths - longest
    group.begin(longest)
    block = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    model(mx.array(block, dtype=mx.int32), cache=group.layers)
    mx.eval(group.arrays())
    return [_staged(model, group, slot, longest, len(prompt)) for slot, prompt in enumerate(prompts)]


def _staged(model: Any, group: RowGroup, slot: int, longest: int, length: int) -> StagedRow:
    staged = StagedRow(model)
    for store, cache in zip(group.stores, leaf_caches(staged.caches), strict=True):
        assert isinstance(store, KVRows)
        end = group.planes[store.shape.window].cursor + longest
        kept = min(length, cache.max_size) if isinstance(cache, RotatingKVCache) else length
        part = slice(slot, slot + 1)
        cache.keys, cache.values = store.keys[part, :, end - kept : end], store.values[part, :, end - kept : end]
        cache.offset = length
        if isinstance(cache, RotatingKVCache):
            cache._idx = kept
    staged.length = length
    return staged
