"""The tokenizer of a GGUF file as `tokenizer.json`, and its special tokens and chat template.

Two kinds exist: byte-level BPE ("gpt2"), whose text is first split by a pattern named in the file, and
SentencePiece ("llama"), whose merges are rebuilt from the pieces and their scores.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import InvalidModel, UnsupportedModel
from .gguf_bpe import bpe_tokenizer
from .gguf_metadata import Metadata
from .gguf_sentencepiece import sentencepiece_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from .gguf_file import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type`."""
END_OF_TURN_TEXTS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<EOT>"}
)
"""Control tokens that end a turn whatever the metadata says; the list of llama.cpp's `llama-vocab.cpp`."""
MAX_CHAT_TEMPLATE = 1 << 20


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says about its tokens.

    Attributes:
        tokens: text of each token, made unique.
        types: token type of each, int32.
        scores: score of each, float32; None in byte-level files.
        bos, eos, pad, unknown: token ids, None where there is none.
        ends: every id that ends a turn.
        add_bos, add_eos: whether raw text is wrapped in them.
    """

    tokens: list[str]
    types: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32] | None
    bos: int | None
    eos: int | None
    pad: int | None
    unknown: int | None
    ends: tuple[int, ...]
    add_bos: bool
    add_eos: bool

    def config(self) -> dict[str, Any]:
        """The token ids for `config.json` and `generation_config.json`."""
        ids = {"bos_token_id": self.bos, "eos_token_id": list(self.ends), "pad_token_id": self.pad}
        return {key: value for key, value in ids.items() if value not in (None, [])}

    def ids_of(self, *types: int) -> list[int]:
        """Ids of all tokens of these types."""
        return [int(i) for i in np.flatnonzero(np.isin(self.types, types))]


def write_tokenizer(file: GgufFile, folder: Path, rows: int, context_tokens: int) -> Vocabulary:
    """Write `tokenizer.json` and `tokenizer_config.json`; returns the vocabulary.

    `rows` is the number of embedding rows, `context_tokens` the model's context. Raises `InvalidModel` or
    `UnsupportedModel`.
    """
    metadata = Metadata(file)
    kind = metadata.text("tokenizer.ggml.model")
    splitter = metadata.text("tokenizer.ggml.pre", "default")
    vocabulary = _read(metadata, file.path, rows, kind, splitter)
    try:
        text = _tokenizer_json(metadata, vocabulary, kind, splitter)
    except (UnsupportedModel, InvalidModel):
        raise
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise InvalidModel(f"{file.path}: its tokenizer is damaged: {error}. Download it again.") from error
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    config = _tokenizer_config(metadata, vocabulary, context_tokens)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return vocabulary


def _tokenizer_json(metadata: Metadata, vocabulary: Vocabulary, kind: str, splitter: str) -> str:
    match kind:
        case "gpt2":
            merges = metadata.texts("tokenizer.ggml.merges")
            return bpe_tokenizer(vocabulary, merges, splitter).to_str()
        case "llama":
            prefix = metadata.flag("tokenizer.ggml.add_space_prefix", default=True)
            return sentencepiece_tokenizer(vocabulary, space_prefix=prefix).to_str()
        case _:
            raise UnsupportedModel(
                f"The tokenizer kind {kind!r} of this GGUF file is not supported; gpt2 (byte-level BPE) and "
                "llama (SentencePiece) are. Use the model in MLX or safetensors format instead."
            )


def _read(metadata: Metadata, path: Path, rows: int, kind: str, splitter: str) -> Vocabulary:
    tokens = metadata.texts("tokenizer.ggml.tokens")
    if not 0 < len(tokens) <= rows:
        raise InvalidModel(f"{path} has {len(tokens)} tokens for {rows} embedding rows. Use another file.")
    count = len(tokens)
    types = metadata.numbers("tokenizer.ggml.token_type", count)
    types = np.full(count, NORMAL, np.int32) if types is None else types.astype(np.int32)
    bos, eos = (metadata.token(f"tokenizer.ggml.{name}_token_id", count) for name in ("bos", "eos"))
    begins = kind == "llama" or splitter in ("llama-bpe", "llama3", "llama-v3")
    return Vocabulary(
        tokens=_unique(tokens),
        types=types,
        scores=metadata.numbers("tokenizer.ggml.scores", count),
        bos=bos,
        eos=eos,
        pad=metadata.token("tokenizer.ggml.padding_token_id", count),
        unknown=metadata.token("tokenizer.ggml.unknown_token_id", count),
        ends=_ends(metadata, tokens, types, eos),
        add_bos=bos is not None and metadata.flag("tokenizer.ggml.add_bos_token", default=begins),
        add_eos=eos is not None and metadata.flag("tokenizer.ggml.add_eos_token", default=False),
    )


def _unique(tokens: list[str]) -> list[str]:
    """Tokens, later copies renamed: a vocabulary maps each text to one id."""
    seen: set[str] = set()
    unique = []
    for index, token in enumerate(tokens):
        name = f"<duplicate_{index}>" if token in seen or not token else token
        seen.add(name)
        unique.append(name)
    return unique


def _ends(metadata: Metadata, tokens: list[str], types: npt.NDArray[np.int32], eos: int | None) -> tuple[int, ...]:
    named = [metadata.token(f"tokenizer.ggml.{name}_token_id", len(tokens)) for name in ("eot", "eom")]
    special = [
        int(i) for i in np.flatnonzero(np.isin(types, (CONTROL, USER_DEFINED))) if tokens[i] in END_OF_TURN_TEXTS
    ]
    return tuple(dict.fromkeys(i for i in (eos, *named, *special) if i is not None))


def _tokenizer_config(metadata: Metadata, vocabulary: Vocabulary, context_tokens: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_tokens,
    }
    named = {"bos": vocabulary.bos, "eos": vocabulary.eos, "pad": vocabulary.pad, "unk": vocabulary.unknown}
    config |= {f"{name}_token": vocabulary.tokens[i] for name, i in named.items() if i is not None}
    template = metadata.text("tokenizer.chat_template", "")
    if len(template) > MAX_CHAT_TEMPLATE:
        raise InvalidModel(f"The chat template has {len(template)} characters. Use another file.")
    return config | ({"chat_template": template} if template else {})
