"""Writes a folder with a Qwen3 model of random weights, for measuring speed where no weights can be had.

    python -m benchmarks.random_model FOLDER --shape 1.7b

Speed does not depend on the weights' values. The tokenizer is the synthetic one of `tiny_tokenizer`, as large as the
vocabulary: every id is text.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mlx_troupe.runtime.models.blas import load_blas

from .tiny_tokenizer import EOS_ID, write_tokenizer

QWEN_VOCAB = 151_936


def write(folder: Path, shape: str, vocab: int, dtype: str) -> Path:
    """Write the model into `folder` and return it."""
    load_blas()
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from .decode_rows import build_model, config_of

    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(shape, vocab) | {"eos_token_id": EOS_ID}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder, vocab)
    weights = dict(tree_flatten(build_model(shape, vocab, getattr(mx, dtype)).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_model", description="Write the model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=("tiny", "1.7b", "8b"), default="1.7b")
    parser.add_argument("--vocab", type=int, default=QWEN_VOCAB)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    print(write(options.folder, options.shape, options.vocab, options.dtype))
    return 0


if __name__ == "__main__":
    sys.exit(main())
