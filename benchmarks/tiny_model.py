"""The model of the host-overhead load: a llama so small that the device is almost free.

    python -m benchmarks.tiny_model FOLDER

Random float32 weights, a byte-level tokenizer of 1,000 tokens, a chat template. Tokens that are not
printable by themselves (halves of a character, control and special tokens) get an output row near
zero: no stream ends early, and each token is text at once, so peers that send a chunk for each
piece of text can be counted by chunks.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .tiny_tokenizer import EOS_ID, write_tokenizer

SCALE = 3.0
"""Factor on every matrix; with 1 greedy output is one token over and over."""
SILENT_SCALE = 0.01


def build(folder: Path, *, layers: int = 4, vocab: int = 1000, seed: int = 0) -> Path:
    """Write the model into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "model_type": "llama",
        "eos_token_id": EOS_ID,
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder, vocab)
    _write_weights(folder, config, seed)
    return folder


def _write_weights(folder: Path, config: dict[str, Any], seed: int) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.llama import Model, ModelArgs

    mx.random.seed(seed)
    parameters = tree_flatten(Model(ModelArgs.from_dict(config)).parameters())
    weights = {name: value * SCALE if value.ndim == 2 else value for name, value in parameters}
    printable = mx.array(_printable(folder, config["vocab_size"]))
    weights["lm_head.weight"] *= mx.where(printable, 1.0, SILENT_SCALE)[:, None]
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def _printable(folder: Path, vocab: int) -> list[bool]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [tokenizer.decode([token]) for token in range(vocab)]
    return [text.isascii() and text.isprintable() and bool(text) for text in texts]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiny_model", description="Write the model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    print(build(options.folder, layers=options.layers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
