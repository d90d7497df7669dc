"""Decoding agrees with gguf's own; packing agrees with what MLX unpacks."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGMLQuantizationType as Block

from mlx_troupe.runtime.models.errors import InvalidModel, UnsupportedModel
from mlx_troupe.runtime.models.gguf_blocks import (
    FLOAT_BLOCKS,
    LOSSLESS_BITS,
    REQUANTISED_BLOCKS,
    SUPPORTED_BLOCKS,
    PackedRows,
    check_supported,
    dequantise,
    pack,
    packed_bits,
)

from .gguf_models import random_blocks

SHAPE = (6, 512)


def rows(block: Block) -> np.ndarray:
    return random_blocks(SHAPE, block, np.random.default_rng(int(block)))


def unpacked(packed: PackedRows) -> np.ndarray:
    parts = (mx.array(packed.weight), mx.array(packed.scales), mx.array(packed.biases))
    return np.array(mx.dequantize(*parts, group_size=32, bits=packed.bits))


@pytest.mark.parametrize("block", sorted(SUPPORTED_BLOCKS), ids=lambda block: block.name)
def test_decoding_equals_gguf(block: Block) -> None:
    np.testing.assert_array_equal(dequantise(rows(block), block), quants.dequantize(rows(block), block))


@pytest.mark.parametrize("block", sorted(LOSSLESS_BITS), ids=lambda block: block.name)
def test_packing_loses_nothing(block: Block) -> None:
    packed = pack(rows(block), block)
    assert packed.bits == packed_bits(block, SHAPE[1]) == LOSSLESS_BITS[block]
    np.testing.assert_array_equal(unpacked(packed), quants.dequantize(rows(block), block))


@pytest.mark.parametrize("block", sorted(REQUANTISED_BLOCKS), ids=lambda block: block.name)
def test_requantising_errs_by_half_a_step_at_most(block: Block) -> None:
    packed = pack(rows(block), block)
    error = np.abs(unpacked(packed) - quants.dequantize(rows(block), block)).reshape(-1, 32)
    assert packed.bits == 8
    assert (error <= 0.501 * packed.scales.reshape(-1, 1) + 1e-7).all()


def test_requantising_a_constant_group_keeps_it() -> None:
    packed = pack(np.zeros((2, 210), np.uint8), Block.Q6_K)
    np.testing.assert_array_equal(unpacked(packed), np.zeros((2, 256)))


def test_requantising_infinity_is_refused() -> None:
    raw = random_blocks((1, 256), Block.Q6_K, np.random.default_rng(0))
    raw[0, 208:210] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    with pytest.raises(InvalidModel, match="not finite"):
        pack(raw, Block.Q6_K)


@pytest.mark.parametrize("block", sorted(FLOAT_BLOCKS), ids=lambda block: block.name)
def test_floats_are_never_packed(block: Block) -> None:
    assert packed_bits(block, 64) is None


def test_unsupported_type_names_itself_the_tensor_and_alternatives() -> None:
    with pytest.raises(UnsupportedModel, match=r"IQ2_XXS.*'blk\.0\.attn_q\.weight'.*Q4_K"):
        check_supported(Block.IQ2_XXS, "blk.0.attn_q.weight")
