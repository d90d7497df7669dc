"""Write the tensors of a GGUF file as MLX weights, a few rows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import InvalidModel
from .gguf_blocks import FLOAT_BLOCKS, GROUP, check_supported, dequantise, pack, packed_bits
from .gguf_file import GgufFile, GgufTensor
from .progress import Progress, Report
from .safetensors_file import SafetensorsWriter, TensorSlot

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .gguf_families import Layout

Weights = Literal["float32", "float16", "bfloat16", "packed"]
Scales = Literal["float32", "half"]

CHUNK_ELEMENTS = 1 << 21
"""Weights decoded at a time: 8 MiB of float32."""
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class TensorPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How one tensor of the file becomes one tensor (float) or three (packed).

    Attributes:
        source: the tensor in the file.
        module: mlx-lm's name without ".weight"; with ".bias" for a bias.
        bits: of a packed weight; None for a float one.
        slots: what is written.
        heads: number of heads whose rows are permuted; 0 when they are not.
        offset: added to every value.
    """

    source: GgufTensor
    module: str
    bits: int | None
    slots: tuple[TensorSlot, ...]
    heads: int = 0
    offset: float = 0.0


def plan_weights(file: GgufFile, layout: Layout, weights: Weights, scales: Scales) -> list[TensorPlan]:
    """One plan a tensor; raises `UnsupportedModel` for a block type that cannot be decoded."""
    if weights == "packed":
        float_type = DTYPES["float32" if scales == "float32" else layout.family.half]
    else:
        float_type = DTYPES[weights]
    plans = [
        _plan(file.tensors[source], name, layout, float_type, packed=weights == "packed")
        for source, name in layout.names.items()
    ]
    if weights == "packed" and all(plan.bits is None for plan in plans):
        raise InvalidModel(f"{file.path} has no quantised tensors to pack. Use float16 or bfloat16 weights.")
    return plans


def _plan(tensor: GgufTensor, name: str, layout: Layout, float_type: str, *, packed: bool) -> TensorPlan:
    check_supported(tensor.block_type, tensor.name)
    if len(tensor.shape) == 1 and tensor.block_type not in FLOAT_BLOCKS:
        raise InvalidModel(f"{tensor.name!r} is a vector of blocks {tensor.block_type.name}. Use another file.")
    module = name.removesuffix(".weight")
    bits = packed_bits(tensor.block_type, tensor.shape[-1]) if packed and len(tensor.shape) == 2 else None
    return TensorPlan(
        source=tensor,
        module=module,
        bits=bits,
        slots=_slots(tensor, name, module, bits, float_type),
        heads=_permuted_heads(tensor.name, layout),
        offset=layout.family.norm_offset if name.endswith("norm.weight") else 0.0,
    )


def _slots(tensor: GgufTensor, name: str, module: str, bits: int | None, float_type: str) -> tuple[TensorSlot, ...]:
    if bits is None:
        return (TensorSlot(name, float_type, tensor.shape),)
    rows, columns = tensor.shape
    groups = (rows, columns // GROUP)
    return (
        TensorSlot(name, "U32", (rows, columns * bits // 32)),
        TensorSlot(f"{module}.scales", float_type, groups),
        TensorSlot(f"{module}.biases", float_type, groups),
    )


def _permuted_heads(source: str, layout: Layout) -> int:
    if not layout.family.permuted:
        return 0
    if ".attn_q." in source:
        return int(layout.config["num_attention_heads"])
    return int(layout.config["num_key_value_heads"]) if ".attn_k." in source else 0


def write_weights(file: GgufFile, plans: list[TensorPlan], path: Path, report: Report) -> dict[str, str]:
    """Write all tensors to the safetensors file `path`; returns each one's SHA-256."""
    slots = [slot for plan in plans for slot in plan.slots]
    with SafetensorsWriter(path, slots) as writer:
        for done, plan in enumerate(plans):
            report(Progress("convert", done, len(plans), "tensors"))
            _write_tensor(file, plan, writer)
        report(Progress("convert", len(plans), len(plans), "tensors"))
        return writer.digests()


def _write_tensor(file: GgufFile, plan: TensorPlan, writer: SafetensorsWriter) -> None:
    for rows in _row_chunks(file, plan):
        if plan.bits is not None:
            packed = pack(rows, plan.source.block_type)
            parts: tuple[npt.NDArray[Any], ...] = (packed.weight, packed.scales, packed.biases)
        else:
            parts = (dequantise(rows, plan.source.block_type) + np.float32(plan.offset),)
        for slot, part in zip(plan.slots, parts, strict=True):
            writer.append(slot.name, part if slot.dtype == "U32" else _cast(part, slot, plan.source))


def _row_chunks(file: GgufFile, plan: TensorPlan) -> Iterator[npt.NDArray[np.uint8]]:
    """Encoded rows in their final order, a few MiB of weights at a time."""
    encoded = file.rows(plan.source)
    if plan.heads and len(plan.source.shape) == 1:
        encoded = encoded.reshape(plan.source.shape[0], -1)
    order = _unpermuted(len(encoded), plan.heads)
    step = max(1, CHUNK_ELEMENTS // plan.source.shape[-1])
    for start in range(0, len(encoded), step):
        yield encoded[order[start : start + step]]


def _unpermuted(rows: int, heads: int) -> npt.NDArray[np.intp]:
    """The source row of each row. llama.cpp interleaves the two halves of every head's rows."""
    order = np.arange(rows)
    if not heads:
        return order
    return order.reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _cast(values: npt.NDArray[Any], slot: TensorSlot, source: GgufTensor) -> npt.NDArray[Any]:
    """Values in the slot's type; bfloat16 as its upper 16 bits, rounded to even.

    Raises `InvalidModel` when float16 cannot hold them.
    """
    single = values.astype(np.float32, copy=False)
    if slot.dtype == "F32":
        return single
    if slot.dtype == "F16":
        with np.errstate(over="ignore"):
            half = single.astype(np.float16)
        if np.isinf(half).any():
            raise InvalidModel(f"Tensor {source.name!r} exceeds float16. Convert it with bfloat16 weights.")
        return half
    bits = np.ascontiguousarray(single).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
