"""Checks on a model folder before anything in it is used. Nothing in a folder is ever run.

Refused: configurations that name code to import (`auto_map`, `model_file`), and weights that exist only as
pickles, whose loading runs what they contain. Symbolic links are left alone: the Hugging Face cache is made
of them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .errors import InvalidModel, UnsafeModel, UnsupportedModel
from .supported import check_architecture

if TYPE_CHECKING:
    from pathlib import Path

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MAX_JSON_BYTES = 64 << 20
"""Most bytes of a configuration file; `tokenizer.json` is not read here."""
CODE_KEYS = ("auto_map", "model_file")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")


def check_folder(folder: Path) -> dict[str, Any]:
    """Check an MLX or safetensors model folder and return its `config.json`.

    Raises `InvalidModel` (files missing or damaged), `UnsafeModel` or `UnsupportedModel`.
    """
    config = check_configuration(folder)
    check_weights(folder)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise InvalidModel(
            f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES)}). Copy it from the original model."
        )
    return config


def check_configuration(folder: Path) -> dict[str, Any]:
    """Check the JSON files of `folder` alone, which a hub delivers before the weights."""
    if not (folder / "config.json").exists():
        raise InvalidModel(f"{folder} has no config.json, so it is not a model folder. Check the path.")
    config = read_json(folder / "config.json")
    _refuse_code(config, folder / "config.json")
    tokenizer_config = folder / "tokenizer_config.json"
    if tokenizer_config.exists():
        _refuse_code(read_json(tokenizer_config), tokenizer_config)
    check_architecture(config.get("model_type"), str(folder))
    return config


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises `InvalidModel` when it is none."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise InvalidModel(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB. Download the model again.")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidModel(f"{path} cannot be read: {error}. Download the model again.") from error
    if not isinstance(content, dict):
        raise InvalidModel(f"{path} does not hold a JSON object. Download the model again.")
    return content


def _refuse_code(content: dict[str, Any], path: Path) -> None:
    nested = [value for value in content.values() if isinstance(value, dict)]
    named = [key for key in CODE_KEYS if any(key in part for part in (content, *nested))]
    if named:
        raise UnsafeModel(
            f"{path} asks to run code that comes with the model ({', '.join(named)}); mlx-troupe never does. "
            "Choose a conversion without it, for example from mlx-community; if mlx-lm itself has this "
            "architecture, removing the entry from a copy of the file is enough."
        )


def check_weights(folder: Path) -> None:
    """Raise unless `folder` has the safetensors files mlx-lm loads (`model*.safetensors`)."""
    if any(folder.glob("model*.safetensors")):
        return
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise UnsafeModel(
            f"{folder} has its weights only as pickle files ({pickles[0]}), whose loading runs code. "
            "Use a safetensors version of the model."
        )
    if any(name.endswith(".gguf") for name in names):
        raise UnsupportedModel(f"{folder} holds GGUF files. Name the .gguf file itself instead of the folder.")
    raise InvalidModel(f"{folder} has no model*.safetensors files. Download the model again.")
