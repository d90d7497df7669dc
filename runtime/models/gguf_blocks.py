"""Decode GGUF block types to float32, or repack them as MLX affine groups of 32.

A GGUF block of 32 weights is `scale * q + bias` for an unsigned `q` of a few bits, which is what MLX calls
affine quantisation with group size 32. Repacking moves the same integers and constants into MLX's layout,
so nothing is lost while the constants stay float32. Q6_K has groups of 16, which MLX lacks: packing it
means quantising its values again to 8 bits.

Block layouts: ggml/src/ggml-common.h of llama.cpp; MLX's layout: a little-endian bit stream per row.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from gguf import quants
from gguf.constants import GGMLQuantizationType as Block

from .errors import InvalidModel, UnsupportedModel

GROUP = 32
"""Weights that share one scale and bias in packed form."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

FLOAT_BLOCKS = frozenset({Block.F32, Block.F16, Block.BF16})
LOSSLESS_BITS = {
    Block.Q4_0: 4, Block.Q4_1: 4, Block.Q5_0: 5, Block.Q5_1: 5, Block.Q8_0: 8, Block.Q4_K: 4, Block.Q5_K: 5,
}  # fmt: skip
"""Block types that are affine groups of 32, and the bits of one weight."""
REQUANTISED_BLOCKS = frozenset({Block.Q2_K, Block.Q3_K, Block.Q6_K, Block.IQ4_NL, Block.IQ4_XS})
REQUANTISED_BITS = 8
SUPPORTED_BLOCKS = FLOAT_BLOCKS | REQUANTISED_BLOCKS | frozenset(LOSSLESS_BITS)


class PackedRows(msgspec.Struct, frozen=True):
    """Rows in MLX's affine form: `weight = scales * q + biases`.

    Attributes:
        weight: uint32 [rows, columns * bits / 32], the bit stream of the integers.
        scales: float32 [rows, columns / 32].
        biases: float32 [rows, columns / 32].
        bits: of one integer.
    """

    weight: npt.NDArray[np.uint32]
    scales: Floats
    biases: Floats
    bits: int


def check_supported(block_type: Block, tensor: str) -> None:
    """Raise `UnsupportedModel`, naming the block type and the tensor, when it cannot be decoded."""
    if block_type not in SUPPORTED_BLOCKS:
        names = ", ".join(sorted(block.name for block in SUPPORTED_BLOCKS))
        raise UnsupportedModel(
            f"Block type {block_type.name} of tensor {tensor!r} is not supported; supported: {names}. "
            "Use another quantisation of this model, for example Q4_K_M or Q8_0."
        )


def dequantise(rows: Bytes, block_type: Block) -> Floats:
    """Decode encoded rows, uint8 [rows, row_bytes], to float32 [rows, columns]."""
    rows = np.ascontiguousarray(rows)
    if block_type == Block.F32:
        return rows.view(np.float32)
    if block_type == Block.F16:
        return rows.view(np.float16).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        decoded: Floats = quants.dequantize(rows, block_type)
    return decoded


def packed_bits(block_type: Block, columns: int) -> int | None:
    """Bits of one weight in packed form; None: such a tensor stays floating point."""
    if block_type in FLOAT_BLOCKS or columns % GROUP:
        return None
    return LOSSLESS_BITS.get(block_type, REQUANTISED_BITS)


def pack(rows: Bytes, block_type: Block) -> PackedRows:
    """Repack encoded rows, uint8 [rows, row_bytes], as affine groups of 32; see `packed_bits`."""
    rows = np.ascontiguousarray(rows)
    integers, scales, biases = _affine(rows, block_type)
    bits = LOSSLESS_BITS.get(block_type, REQUANTISED_BITS)
    count = len(rows)
    return PackedRows(
        _bit_stream(integers.reshape(count, -1), bits),
        scales.reshape(count, -1).astype(np.float32),
        biases.reshape(count, -1).astype(np.float32),
        bits,
    )


def _affine(rows: Bytes, block_type: Block) -> tuple[Bytes, npt.NDArray[Any], npt.NDArray[Any]]:
    """Integers uint8 [groups, 32], scales and biases [groups], in the order of the rows."""
    match block_type:
        case Block.Q4_0:
            return _symmetric(_fields(rows, 18), scale_at=0, nibbles_at=2)
        case Block.Q4_1:
            return _with_minimum(_fields(rows, 20), nibbles_at=4)
        case Block.Q5_0:
            return _symmetric(_fields(rows, 22), scale_at=0, nibbles_at=6, high_at=2)
        case Block.Q5_1:
            return _with_minimum(_fields(rows, 24), nibbles_at=8, high_at=4)
        case Block.Q8_0:
            return _signed_bytes(_fields(rows, 34))
        case Block.Q4_K:
            return _super_blocks(_fields(rows, 144), nibbles_at=16)
        case Block.Q5_K:
            return _super_blocks(_fields(rows, 176), nibbles_at=48, high_at=16)
        case _:
            return _requantise(dequantise(rows, block_type))


def _fields(rows: Bytes, block_bytes: int) -> Bytes:
    return rows.reshape(-1, block_bytes)


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, as float32 [blocks]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)[:, 0].astype(np.float32)


def _integers(blocks: Bytes, nibbles_at: int, high_at: int | None) -> Bytes:
    """32 integers a block: low nibbles first, then high ones, with a fifth bit from `high_at`."""
    nibbles = blocks[:, nibbles_at : nibbles_at + 16]
    low = np.concatenate([nibbles & 15, nibbles >> 4], axis=1)
    if high_at is None:
        return low
    high = np.unpackbits(blocks[:, high_at : high_at + 4], axis=1, bitorder="little")
    return low | (high << 4)


def _symmetric(
    blocks: Bytes, *, scale_at: int, nibbles_at: int, high_at: int | None = None
) -> tuple[Bytes, Floats, Floats]:
    scales = _half(blocks, scale_at)
    middle = np.float32(8 if high_at is None else 16)
    return _integers(blocks, nibbles_at, high_at), scales, -middle * scales


def _with_minimum(blocks: Bytes, *, nibbles_at: int, high_at: int | None = None) -> tuple[Bytes, Floats, Floats]:
    return _integers(blocks, nibbles_at, high_at), _half(blocks, 0), _half(blocks, 2)


def _signed_bytes(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    scales = _half(blocks, 0)
    return blocks[:, 2:] ^ np.uint8(128), scales, (np.float32(-128) * scales).astype(np.float32)


def _super_blocks(blocks: Bytes, *, nibbles_at: int, high_at: int | None = None) -> tuple[Bytes, Floats, Floats]:
    """Q4_K and Q5_K: 256 weights, eight groups with 6-bit scales and minimums under two float16."""
    scales, minimums = _six_bit_pairs(blocks[:, 4:16])
    # Two groups share 32 bytes: low nibbles are the first group, high nibbles the second.
    nibbles = blocks[:, nibbles_at : nibbles_at + 128].reshape(-1, 4, 1, 32)
    integers = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).reshape(-1, 8, 32)
    if high_at is not None:
        high = blocks[:, None, high_at : high_at + 32] >> np.arange(8, dtype=np.uint8)[None, :, None]
        integers = integers | ((high & 1) << 4)
    return (
        integers.reshape(-1, 32),
        (_half(blocks, 0)[:, None] * scales).reshape(-1),
        (-_half(blocks, 2)[:, None] * minimums).reshape(-1),
    )


def _six_bit_pairs(packed: Bytes) -> tuple[Floats, Floats]:
    """Eight 6-bit scales and eight 6-bit minimums out of 12 bytes: float32 [blocks, 8] each."""
    first, second, mixed = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (mixed & 15) | ((first >> 6) << 4)], axis=1)
    minimums = np.concatenate([second & 63, (mixed >> 4) | ((second >> 6) << 4)], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _requantise(values: Floats) -> tuple[Bytes, Floats, Floats]:
    """Nearest of 256 evenly spaced values between each group's least and greatest."""
    groups = values.reshape(-1, GROUP)
    least = groups.min(axis=1)
    scales = (groups.max(axis=1) - least) / 255
    if not np.isfinite(scales).all():
        raise InvalidModel("The weights hold values that are not finite. Download the file again.")
    divisor = np.where(scales == 0, 1, scales)[:, None]
    integers = np.rint((groups - least[:, None]) / divisor).astype(np.uint8)
    return integers, scales.astype(np.float32), least


def _bit_stream(integers: Bytes, bits: int) -> npt.NDArray[np.uint32]:
    """Pack integers below `2**bits`, uint8 [rows, columns], into uint32 [rows, columns * bits / 32]."""
    if bits == 8:
        return np.ascontiguousarray(integers).view(np.uint32)
    if bits == 4:
        return np.ascontiguousarray(integers[:, 0::2] | (integers[:, 1::2] << 4)).view(np.uint32)
    single_bits = np.unpackbits(integers[..., None], axis=-1, count=bits, bitorder="little")
    flat = single_bits.reshape(len(integers), -1)
    return np.packbits(flat, axis=1, bitorder="little").view(np.uint32)
