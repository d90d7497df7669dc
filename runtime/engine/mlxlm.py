"""The one place where mlx-lm's internals are imported: they move between its minor versions."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from mlx_lm.models import base
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    create_causal_mask,
    make_prompt_cache,
)

if TYPE_CHECKING:
    from collections.abc import Callable

SUPPORTED_MLX_LM = ">=0.32.2,<0.33"

solo_attention: Callable[..., Any] = base.__dict__["scaled_dot_product_attention"]
"""mlx-lm's own attention, for everything that is not ours."""


def bind_attention(seam: Callable[..., Any]) -> None:
    """Make every loaded mlx-lm model module call `seam` for attention.

    The seam gets (queries, keys, values, cache=, scale=, mask=, sinks=) and hands whatever is not ours to
    `solo_attention`. Modules bind the name at import, so this runs after a model's module was imported.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and hasattr(module, "scaled_dot_product_attention"):
            vars(module)["scaled_dot_product_attention"] = seam


__all__ = [
    "SUPPORTED_MLX_LM",
    "ArraysCache",
    "CacheList",
    "ChunkedKVCache",
    "KVCache",
    "QuantizedKVCache",
    "RotatingKVCache",
    "bind_attention",
    "create_causal_mask",
    "make_prompt_cache",
    "solo_attention",
]
