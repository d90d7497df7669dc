"""The seam for ragged kernels, with a kernel made of plain operations; the real one is checked on its device."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_troupe.runtime.engine.kernels import ragged_attention
from mlx_troupe.runtime.engine.kv.batch import RowBatch
from mlx_troupe.runtime.engine.probe import choose_layout

from .conftest import random_prompts
from .steps import decode_all


class PlainKernel:
    """The oracle: masked attention over the whole buffer; counts its calls."""

    calls = 0

    def fits(self, heads, kv_heads, head_dim, value_dim, dtype) -> bool:
        return head_dim == value_dim

    def splits(self, rows, kv_heads, longest) -> int:
        return 1

    def __call__(self, queries, keys, values, new_keys, new_values, starts, place, splits, scale) -> mx.array:
        self.calls += 1
        cursor = place[1].item()
        keys[:, :, cursor : cursor + 1] = new_keys  # item assignment changes the store's own array, as the kernel does
        values[:, :, cursor : cursor + 1] = new_values
        places = mx.arange(keys.shape[2])
        seen = (places >= starts[:, None]) & (places <= cursor)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=seen[:, None, None, :])


@pytest.mark.parametrize("classes", [(), (16, 64, 256)])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "gpt_oss", "gemma3n"])
def test_ragged_kernel_gives_the_same_tokens(architecture, classes, tiny_model, solo) -> None:
    model, kernel = tiny_model(architecture), PlainKernel()
    layout = choose_layout(model, kernel)
    assert layout.kernel is kernel
    kernel.calls = 0
    batch = RowBatch(model, layout.shapes, classes, "split", kernel)
    prompts = random_prompts(6, seed=11)
    outputs = decode_all(model, batch, prompts, 24)
    assert outputs == [solo(architecture, prompt, 24) for prompt in prompts]
    assert kernel.calls > 0 or architecture == "gpt_oss"


def test_a_wrong_kernel_is_not_used(tiny_model) -> None:
    class Wrong(PlainKernel):
        def __call__(self, queries, keys, values, new_keys, new_values, starts, place, splits, scale) -> mx.array:
            return super().__call__(queries, keys, values, new_keys, new_values, starts + 1, place, splits, scale)

    assert choose_layout(tiny_model("llama"), Wrong()).kernel is None


@pytest.mark.device
@pytest.mark.parametrize("splits", [1, 3, 8])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (32, 8, 128), (8, 8, 64), (8, 1, 256)])
def test_device_kernel_equals_masked_attention(heads, kv_heads, dim, dtype, splits) -> None:
    kernel = ragged_attention()
    if kernel is None:
        pytest.skip("this device has no ragged kernel")
    error, written = kernel_error(kernel, heads, kv_heads, dim, dtype, splits)
    assert error < 0.02
    assert written


def kernel_error(kernel, heads, kv_heads, dim, dtype, splits) -> tuple[float, bool]:
    """Largest difference to masked attention, and whether the new entries were written."""
    rows, capacity, cursor = 9, 1536, 1399
    mx.random.seed(0)
    queries = mx.random.normal((rows, heads, 1, dim)).astype(dtype)
    keys, values = (mx.random.normal((rows, kv_heads, capacity, dim)).astype(dtype) for _ in range(2))
    new_keys, new_values = (mx.random.normal((rows, kv_heads, 1, dim)).astype(dtype) for _ in range(2))
    oracle_keys, oracle_values = keys + 0, values + 0
    starts = mx.array([0, 7, 255, 256, 257, 1000, 1300, 1398, 1399], dtype=mx.int32)
    place = mx.array([capacity, cursor], dtype=mx.int32)
    mx.eval(keys, values, new_keys, new_values, oracle_keys, oracle_values)
    scale = dim**-0.5
    expected = PlainKernel()(queries, oracle_keys, oracle_values, new_keys, new_values, starts, place, 1, scale)
    mx.eval(expected, oracle_keys, oracle_values)
    assert kernel.fits(heads, kv_heads, dim, dim, dtype)
    found = kernel(queries, keys, values, new_keys, new_values, starts, place, splits, scale)
    mx.eval(found)
    written = mx.array_equal(keys, oracle_keys).item() and mx.array_equal(values, oracle_values).item()
    return mx.abs(found.astype(mx.float32) - expected.astype(mx.float32)).max().item(), bool(written)
