"""Rotary embedding settings of a GGUF file, as `rope_scaling` of a `config.json`.

llama.cpp stores Llama 3's rescaling not as parameters but as a table of divisors, one per frequency
(`rope_freqs.weight`); the parameters are found again by trying the published ones against the table.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .errors import InvalidModel, UnsupportedModel
from .gguf_blocks import check_supported, dequantise

if TYPE_CHECKING:
    from .gguf_file import GgufFile
    from .gguf_metadata import Metadata

FREQUENCY_TENSOR = "rope_freqs.weight"
LLAMA3_CONTEXTS = (8192, 4096, 16384, 32768)
LLAMA3_BANDS = ((1.0, 4.0),)
"""Low and high frequency factors; every published model has these."""


def rope_scaling(file: GgufFile, metadata: Metadata, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The `rope_scaling` entry, None for plain rotary embeddings.

    Raises `UnsupportedModel` for partial rotation and kinds of scaling that mlx-lm lacks here.
    """
    rotated = metadata.integer(metadata.scoped("rope.dimension_count"), head_dim)
    if rotated != head_dim:
        raise UnsupportedModel(
            f"{file.path} rotates {rotated} of {head_dim} dimensions; mlx-lm's {metadata.architecture} rotates "
            "all of them. Use the original model in MLX format."
        )
    if FREQUENCY_TENSOR in file.tensors:
        return _llama3(file, theta, head_dim)
    return _named_scaling(file, metadata)


def _named_scaling(file: GgufFile, metadata: Metadata) -> dict[str, Any] | None:
    prefix = metadata.scoped("rope.scaling.")
    kind = metadata.text(f"{prefix}type", "none")
    legacy = metadata.scoped("rope.scale_linear")
    if kind == "none" and metadata.has(legacy):
        return {"type": "linear", "factor": metadata.number(legacy)}
    match kind:
        case "none":
            return None
        case "linear":
            return {"type": "linear", "factor": metadata.number(f"{prefix}factor")}
        case "yarn":
            return {
                "type": "yarn",
                "factor": metadata.number(f"{prefix}factor"),
                "original_max_position_embeddings": metadata.integer(f"{prefix}original_context_length"),
            }
        case _:
            raise UnsupportedModel(
                f"{file.path} scales rotary embeddings by {kind!r}; linear, yarn and llama3 are supported. "
                "Use the original model in MLX format."
            )


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    tensor = file.tensors[FREQUENCY_TENSOR]
    check_supported(tensor.block_type, tensor.name)
    divisors = dequantise(file.rows(tensor), tensor.block_type).reshape(-1)
    if divisors.size != head_dim // 2 or not np.isfinite(divisors).all() or (divisors < 1).any():
        raise InvalidModel(f"{file.path}: {FREQUENCY_TENSOR} does not fit {head_dim} dimensions. Use another file.")
    factor = float(divisors.max())
    for context in LLAMA3_CONTEXTS:
        for low, high in LLAMA3_BANDS:
            table = llama3_divisors(theta, head_dim, factor, low, high, context)
            if np.allclose(table, divisors, rtol=1e-3):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": context,
                }
    raise UnsupportedModel(
        f"{file.path}: the table {FREQUENCY_TENSOR} is none of Llama 3's. Use the original model in MLX format."
    )


def llama3_divisors(
    theta: float, head_dim: int, factor: float, low: float, high: float, context: int
) -> npt.NDArray[np.float64]:
    """What Llama 3 divides each rotary frequency by: float64 [head_dim / 2].

    Formula: `_compute_llama3_parameters` of transformers' `modeling_rope_utils.py`.
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (context / wavelengths - low) / (high - low)
    blended = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelengths < context / high, 1.0, np.where(wavelengths > context / low, factor, blended))
