"""Fused projections give what the single ones gave, and a group that is called otherwise is taken apart."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlx_troupe.runtime.models.fused import FusedPart, fuse_projections

from .tiny import build_tiny

TOKENS = mx.array([[5, 90, 77, 3, 20, 7, 11], [8, 8, 1, 400, 2, 30, 6]])


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A fresh model of an architecture."""

    def made(architecture: str):
        folder = tmp_path_factory.getbasetemp() / f"fused-{architecture}"
        if not folder.exists():
            build_tiny(architecture, folder)
        return load_model(folder)[0]

    return made


def logits(model) -> mx.array:
    """Of a prompt in two chunks."""
    cache = make_prompt_cache(model)
    first = model(TOKENS[:, :4], cache=cache)
    return mx.concatenate([first, model(TOKENS[:, 4:], cache=cache)], axis=1).astype(mx.float32)


def weight_bytes(model) -> int:
    return sum(value.nbytes for _, value in tree_flatten(model.parameters()))


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3n", "deepseek_v3", "qwen3_next", "gpt_oss"])
def test_the_logits_stay(architecture, load) -> None:
    plain, fused = load(architecture), load(architecture)
    fuse_projections(fused)
    assert mx.allclose(logits(plain), logits(fused), rtol=1e-3, atol=1e-3)
    assert weight_bytes(fused) == weight_bytes(plain), "the same weights, once"


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_projections_are_fused_in_their_own_form(bits, load) -> None:
    plain, fused = load("llama"), load("llama")
    for model in (plain, fused):
        nn.quantize(model, group_size=32, bits=bits)
    assert fuse_projections(fused) > 0
    assert isinstance(fused.layers[0].self_attn.q_proj.fused, nn.QuantizedLinear)
    assert mx.allclose(logits(plain), logits(fused), rtol=1e-3, atol=1e-3)
    assert weight_bytes(fused) == weight_bytes(plain)


def test_llama_has_two_groups_a_layer(load) -> None:
    model = load("llama")
    assert fuse_projections(model) == 2 * len(model.layers)
    assert all(isinstance(layer.mlp.up_proj, FusedPart) for layer in model.layers)


class Crossed(nn.Module):
    """Calls its projections on different inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, size) for size in (8, 4, 4))

    def __call__(self, x):
        return self.q_proj(x) + mx.concatenate([self.k_proj(x * 2), self.v_proj(x * 2)], axis=-1)


class Whole(nn.Module):
    """A model of crossed and of mixed layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = [Crossed(), Crossed()]
        self.layers[1].k_proj = nn.Linear(8, 4, bias=False)

    def __call__(self, tokens, cache=None):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x

    def make_cache(self):
        return []


def test_a_group_that_is_called_otherwise_is_taken_apart() -> None:
    model = Whole()
    mx.eval(model.parameters())
    tokens = mx.array([[1, 2, 3]])
    before = model(tokens)
    shapes = {name: value.shape for name, value in tree_flatten(model.parameters())}
    assert fuse_projections(model) == 0
    assert {name: value.shape for name, value in tree_flatten(model.parameters())} == shapes
    assert mx.array_equal(model(tokens), before)


def test_nothing_is_kept_after_a_forward(load) -> None:
    model = load("llama")
    fuse_projections(model)
    model(TOKENS)
    products = [module._product for _, module in model.named_modules() if isinstance(module, FusedPart)]
    assert products
    assert all(product._input is None and not product._parts for product in products)
