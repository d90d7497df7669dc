"""Norms and rotary positions of few operations, for MLX's CPU backend.

There `mx.fast.rms_norm` and `mx.fast.rope` fall apart into 13 and 27 operations, each handed to another thread: of the
560 of a step of a four-layer model, 330. Here the angles of a step are computed once for all layers, and what is
elementwise is compiled into one operation, as mlx-lm's activations are. Values are those of MLX's own formulas, in the
same order: the same bits. Float32 alone; all else goes MLX's way.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

logger = logging.getLogger(__name__)

_TRIED_TOKENS = 3
_NEAR = 1e-3


def lighten(model: Any) -> int:
    """Change the model's norms and rotary positions, where that changes nothing else; returns how many were.

    Only those that are exactly mlx's own are changed, and none where the model's logits differ or cannot be had.
    """
    angles = Angles()
    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    before = _logits(model)
    for _, module in model.named_modules():
        kind = type(module)
        if kind is nn.RMSNorm:
            module.__class__ = LightRMSNorm
        elif kind is nn.RoPE and not module.traditional:
            module.__class__ = LightRoPE
            module._angles = angles
        else:
            continue
        changed.append((module, kind))
    try:
        same = bool(mx.allclose(_logits(model), before, rtol=_NEAR, atol=_NEAR))
        fault = "the logits differ"
    except Exception as error:
        same, fault = False, str(error)
    if same:
        return len(changed)
    logger.info("norms and rotary positions are mlx's own: %s", fault)
    for module, kind in changed:
        module.__class__ = kind
    return 0


def _logits(model: Any) -> mx.array:
    """Of a few tokens and one more after them."""
    cache = make_prompt_cache(model)
    model(mx.zeros((1, _TRIED_TOKENS), mx.int32), cache=cache)
    out: mx.array = model(mx.zeros((1, 1), mx.int32), cache=cache)
    mx.eval(out)
    return out


class LightRMSNorm(nn.RMSNorm):
    """The same norm: two operations for the sum of squares, one for the rest."""

    def __call__(self, x: mx.array) -> mx.array:
        """Normalise the last axis."""
        weight = self["weight"]
        if x.dtype != mx.float32 or weight.dtype != mx.float32:
            return super().__call__(x)
        return _scaled(x, mx.square(x).sum(axis=-1, keepdims=True), 1.0 / x.shape[-1], self.eps, weight)


class LightRoPE(nn.RoPE):
    """The same rotation; its angles come from `Angles`, which the model's layers share."""

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        """Rotate (rows, heads, tokens, size) by the positions from `offset` on."""
        if x.dtype != mx.float32 or x.ndim != 4:
            return super().__call__(x, offset)
        half = self.dims // 2
        cosines, sines = self._angles.of(offset, x.shape[2], self.dims, self.base, self.scale)
        parts = [*_turned(x[..., :half], x[..., half : 2 * half], cosines, sines)]
        if self.dims < x.shape[-1]:
            parts.append(x[..., self.dims :])
        return mx.concatenate(parts, axis=-1)


class Angles:
    """Cosines and sines for the last positions asked for: those of one forward, which all its layers ask for."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, float, float], tuple[mx.array, mx.array]] = {}
        self._offset: Any = None
        self._tokens = 0

    def of(self, offset: Any, tokens: int, dims: int, base: float, scale: float) -> tuple[mx.array, mx.array]:
        """(rows or 1, 1, tokens, dims / 2) each.

        Args:
            offset: of the first token: a number, or int32 (rows,). The same array means the same values.
        """
        number = isinstance(offset, int) and isinstance(self._offset, int)
        known = offset == self._offset if number else offset is self._offset
        if not known or tokens != self._tokens:
            self._known.clear()
            self._offset, self._tokens = offset, tokens
        key = dims, base, scale
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = _angles(offset, tokens, dims, base, scale)
        return found


def _angles(offset: Any, tokens: int, dims: int, base: float, scale: float) -> tuple[mx.array, mx.array]:
    """As `mx.fast.rope` computes them."""
    half = dims // 2
    if isinstance(offset, mx.array) and offset.size > 1:
        offset = offset[:, None, None]
    positions = (mx.arange(tokens, dtype=mx.float32) + offset) * scale
    theta = positions[..., None] * mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(base) / half))
    return mx.cos(theta), mx.sin(theta)


@partial(mx.compile, shapeless=True)
def _turned(x: mx.array, y: mx.array, cosines: mx.array, sines: mx.array) -> tuple[mx.array, mx.array]:
    return x * cosines - y * sines, x * sines + y * cosines


@partial(mx.compile, shapeless=True)
def _scaled(x: mx.array, squares: mx.array, share: float, eps: float, weight: mx.array) -> mx.array:
    return x * mx.rsqrt(squares * share + eps) * weight
