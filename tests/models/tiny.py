"""Tiny random models, one per cache kind, written as folders that `mlx_lm.load` reads.

The models are mlx-lm's own classes with weights from a fixed seed. Matrices are scaled up so that
greedy output varies, and the row of the end token is shrunk so that greedy decoding hardly ever
picks it: a test that wants an end names its own stop token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.tiny_tokenizer import EOS_ID, write_tokenizer

from .tiny_configs import CONFIGS

if TYPE_CHECKING:
    import mlx.core as mx

    from .tiny_base import Config

ARCHITECTURES = tuple(CONFIGS)
VOCABULARY_WEIGHTS = ("embed_tokens.weight", "embeddings.weight", "lm_head.weight")
VOCABULARY_SCALE = {"gemma2": 0.6, "gemma3_text": 1.0, "gemma3n": 0.5, "qwen3": 1.5, "lfm2": 1.5}
"""Gemma multiplies embeddings by the root of the hidden size: larger ones drown every layer's output."""
MATRIX_SCALE = 3.0
"""Factor on every matrix; 1 makes most architectures repeat one token."""


def build_tiny(
    arch: str, folder: Path, *, vocab: int = 512, seed: int = 0, head_dim: int = 16, scale: float = MATRIX_SCALE
) -> Path:
    """Write a random model of mlx-lm's architecture `arch` into `folder` and return `folder`.

    `head_dim` is 16 or 32 (a quantised cache needs 32). Weights are float32 and depend on `seed`
    alone. `KeyError` names an unknown architecture; see `ARCHITECTURES`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": arch, "eos_token_id": EOS_ID} | CONFIGS[arch](vocab, head_dim)
    write_tokenizer(folder, vocab)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write_weights(config, folder, seed, scale)
    return folder


def _write_weights(config: Config, folder: Path, seed: int, scale: float) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    mx.random.seed(seed)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(json.loads(json.dumps(config))))
    parameters: list[tuple[str, mx.array]] = sorted(tree_flatten(model.parameters()))
    vocabulary_scale = VOCABULARY_SCALE.get(config["model_type"], scale)
    weights = {name: _randomise(name, value, scale, vocabulary_scale) for name, value in parameters}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def _randomise(name: str, value: mx.array, scale: float, vocabulary_scale: float) -> mx.array:
    """Scale matrices, add noise to vectors and constants, shrink the row of the end token."""
    import mlx.core as mx

    value = value.astype(mx.float32)
    if value.ndim < 2 or mx.var(value).item() == 0:
        return value + 0.1 * mx.random.normal(value.shape)
    if "conv" in name:
        return value
    if name.endswith(VOCABULARY_WEIGHTS):
        rows = mx.arange(value.shape[0])[:, None]
        return value * mx.where(rows == EOS_ID, 0.01, vocabulary_scale)
    return value * scale
