"""One row's KV on its own, while its prompt is computed: mlx-lm's caches for one sequence.

Prefilling a row alone keeps padding, other rows' lengths and other rows' faults out of it; the finished KV is copied
into the batch once (10 ms against 8.5 s of prefill when measured). Owned by the MLX thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..mlxlm import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache
from .pages import cut, leaf_caches, restore, widened
from .plane import room_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .pages import StoredPage


class StagedRow:
    """KV of `length` prompt tokens of one row, in caches of its own; `pooled` is what PromptReader makes of them.

    Args:
        model: mlx-lm's.
        target: tokens it will have in the end, if known: buffers are made for them at once, and of a size that a batch
            may take over.
    """

    def __init__(self, model: Any, target: int = 0) -> None:
        self._model = model
        self._target = target
        self.caches: list[Any] = make_prompt_cache(model)
        self.length = 0
        self.pooled: mx.array | None = None

    def append(self, tokens: Sequence[int]) -> None:
        """Run more prompt tokens through the model and evaluate their KV; blocks until the device is done."""
        self.forward(tokens)
        mx.eval(list(self.arrays()))

    def forward(self, tokens: Sequence[int], module: Any = None) -> mx.array:
        """Run more prompt tokens through the model, or the part of it that gives hidden states; nothing is evaluated.

        Returns:
            The output, lazy: logits or hidden states (1, tokens, size).
        """
        self._widen()
        output: mx.array = (module or self._model)(mx.array([tokens], dtype=mx.int32), cache=self.caches)
        self.length += len(tokens)
        return output

    def arrays(self) -> Iterator[mx.array]:
        """Everything the row holds."""
        for cache in leaf_caches(self.caches):
            if isinstance(cache, ArraysCache):
                yield from (state for state in cache.cache if state is not None)
            elif isinstance(cache.keys, tuple):  # quantised
                yield from (*cache.keys, *cache.values)
            elif cache.keys is not None:
                yield cache.keys
                yield cache.values

    def restore(self, pages: Sequence[StoredPage], tokens: int) -> None:
        """Start from stored pages, of which the first `tokens` tokens are taken.

        Evaluated, so that the pages may be dropped and their memory goes.

        Raises:
            ValueError: the pages hold fewer tokens, or a checkpoint is needed and missing.
        """
        restore(self.caches, pages, tokens, room_for(max(self._target, tokens)))
        mx.eval(list(self.arrays()))
        self.length = tokens

    def _widen(self) -> None:
        """Make room for the whole prompt behind its first chunk, instead of copying all of it at each."""
        if not self._target:
            return
        room = room_for(self._target)
        for cache in leaf_caches(self.caches):
            if type(cache) is KVCache and cache.keys is not None and cache.keys.shape[2] < room:
                cache.keys = widened(cache.keys[:, :, : cache.offset], room)
                cache.values = widened(cache.values[:, :, : cache.offset], room)

    def cut(self, low: int, high: int, *, checkpoint: bool = False) -> StoredPage:
        """See `pages.cut`."""
        return cut(self.caches, low, high, checkpoint=checkpoint)


def newest(cache: Any, count: int) -> tuple[mx.array, mx.array]:
    """The last `count` tokens of a KV cache of one row, or all it has: keys and values (1, heads, <= count, size)."""
    keys, values = cache.keys, cache.values
    if isinstance(cache, RotatingKVCache):
        keys, values = cache._temporal_order(keys), cache._temporal_order(values)
        end = keys.shape[2]
    else:
        end = cache.offset
    low = max(0, end - count)
    return keys[:, :, low:end], values[:, :, low:end]
