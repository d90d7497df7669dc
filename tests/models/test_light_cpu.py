"""Norms and rotary positions of few operations: mlx's values bit for bit, and nothing else is changed."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlx_troupe.runtime.models import light_cpu
from mlx_troupe.runtime.models.light_cpu import Angles, LightRMSNorm, LightRoPE, lighten
from tests.models.tiny import build_tiny


@pytest.fixture
def tiny_model(tmp_path):
    """A fresh tiny model of an architecture; the same weights each time."""

    def make(architecture: str):
        folder = tmp_path / architecture
        return load_model(folder if folder.exists() else build_tiny(architecture, folder))[0]

    return make


def light_rope(dims: int, **settings: float) -> nn.RoPE:
    rope = nn.RoPE(dims, **settings)
    rope.__class__ = LightRoPE
    rope._angles = Angles()
    return rope


def same(found: mx.array, wanted: mx.array) -> bool:
    return np.array_equal(np.array(found), np.array(wanted), equal_nan=True)


@pytest.mark.parametrize("settings", [{}, {"base": 1e6}, {"base": 500.0, "scale": 0.25}], ids=str)
@pytest.mark.parametrize("offset", [0, 11, "one", "rows"])
@pytest.mark.parametrize(("size", "dims", "tokens"), [(16, 16, 1), (20, 16, 1), (16, 16, 7)])
def test_rotations_are_mlxs_bit_for_bit(size, dims, tokens, offset, settings) -> None:
    x = mx.random.normal((5, 3, tokens, size), key=mx.random.key(size + tokens))
    at = {"one": mx.array([3]), "rows": mx.array([1, 2, 3000, 500, 7], dtype=mx.int32)}.get(offset, offset)
    assert same(light_rope(dims, **settings)(x, at), nn.RoPE(dims, **settings)(x, at))


def test_other_dtypes_go_mlxs_way() -> None:
    x = mx.random.normal((2, 3, 4, 16)).astype(mx.float16)
    assert same(light_rope(16)(x, 5), nn.RoPE(16)(x, 5))


def test_angles_follow_the_positions() -> None:
    rope, plain = light_rope(16), nn.RoPE(16)
    x = mx.random.normal((2, 3, 1, 16))
    for offset in (5, mx.array([5, 6]), mx.array([9, 6]), 5, 6, mx.array([9, 6])):
        assert same(rope(x, offset), plain(x, offset))
    longer = mx.random.normal((2, 3, 4, 16))
    assert same(rope(longer, 6), plain(longer, 6))


@pytest.mark.parametrize("shape", [(5, 1, 64), (2, 3, 7, 64), (64,)])
def test_norms_are_mlxs_bit_for_bit(shape) -> None:
    plain = nn.RMSNorm(64, eps=1e-6)
    plain.weight = mx.random.normal((64,))
    light = nn.RMSNorm(64, eps=1e-6)
    light.weight = plain.weight
    light.__class__ = LightRMSNorm
    for scale in (1e-4, 1.0, 1e4):
        x = mx.random.normal(shape) * scale
        assert same(light(x), plain(x))
    half = mx.random.normal(shape).astype(mx.bfloat16)
    assert same(light(half).astype(mx.float32), plain(half).astype(mx.float32))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_model_gives_the_same_logits(architecture, tiny_model) -> None:
    model, twin = tiny_model(architecture), tiny_model(architecture)
    assert lighten(model) > 4
    cache, other = make_prompt_cache(model), make_prompt_cache(twin)
    tokens = mx.array([[3, 4, 5, 6, 7, 8, 9]])
    for _ in range(4):
        found, wanted = model(tokens, cache=cache), twin(tokens, cache=other)
        assert same(found, wanted)
        tokens = found[:, -1:].argmax(-1)
    assert set(dict(model.parameters())) == set(dict(twin.parameters()))


def test_a_model_whose_logits_change_stays_as_it_was(monkeypatch, tiny_model) -> None:
    monkeypatch.setattr(light_cpu, "_scaled", lambda x, squares, share, eps, weight: x)
    model = tiny_model("llama")
    assert lighten(model) == 0
    assert all(type(module) is not LightRMSNorm and type(module) is not LightRoPE for module in model.modules())


def test_a_model_that_cannot_compile_stays_as_it_was(monkeypatch, tiny_model) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(light_cpu, "_turned", broken)
    assert lighten(tiny_model("llama")) == 0
