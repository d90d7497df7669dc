"""Byte-level BPE tokenizers: the patterns that split text before merging, by llama.cpp's names.

Patterns: `llm_tokenizer_bpe` in llama.cpp's `src/llama-vocab.cpp`, and the `tokenizer.json` of the
original models, which also normalise (Qwen) or skip merges for whole words (Llama 3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .errors import InvalidModel, UnsupportedModel

if TYPE_CHECKING:
    from .gguf_tokenizer import Vocabulary

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"


class Splitter(msgspec.Struct, frozen=True, kw_only=True):
    """How text is cut before merging.

    Attributes:
        patterns: applied one after another; each match becomes a piece of its own.
        whole_words: a piece that is a token as it stands is not built by merges.
        compose: text is brought into Unicode's composed form (NFC) first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    compose: bool = False


_LLAMA3_SPLITTER = Splitter(patterns=(_LLAMA3,), whole_words=True)
_QWEN2_SPLITTER = Splitter(patterns=(_QWEN2,), compose=True)
SPLITTERS = {
    "default": Splitter(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": Splitter(patterns=(_GPT2,)),
    "smollm": Splitter(patterns=(r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3_SPLITTER,
    "llama3": _LLAMA3_SPLITTER,
    "llama-v3": _LLAMA3_SPLITTER,
    "qwen2": _QWEN2_SPLITTER,
    "deepseek-r1-qwen": _QWEN2_SPLITTER,
}
"""By `tokenizer.ggml.pre`."""


def bpe_tokenizer(vocabulary: Vocabulary, merges: list[str], splitter_name: str) -> Tokenizer:
    """Build the tokenizer; raises `UnsupportedModel` for an unknown splitter."""
    splitter = SPLITTERS.get(splitter_name)
    if splitter is None:
        raise UnsupportedModel(
            f"The pre-tokenizer {splitter_name!r} of this GGUF file is not supported; supported: "
            f"{', '.join(SPLITTERS)}. Use the model in MLX or safetensors format instead."
        )
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(vocabulary.tokens)},
            merges=[_pair(merge) for merge in merges],
            ignore_merges=splitter.whole_words,
        )
    )
    if splitter.compose:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitter.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    add_special_tokens(tokenizer, vocabulary, normalized=False)
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    # The first part may itself start with a space.
    middle = merge.find(" ", 1)
    if middle < 0:
        raise InvalidModel(f"The merge {merge[:40]!r} has no second part. Download the file again.")
    return merge[:middle], merge[middle + 1 :]


def add_special_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary, *, normalized: bool) -> None:
    """Add control and user-defined tokens, and the tokens put around raw text.

    `normalized`: user-defined tokens are looked for in the normalised text.
    """
    from .gguf_tokenizer import CONTROL, UNKNOWN, USER_DEFINED

    control = vocabulary.ids_of(CONTROL, UNKNOWN)
    tokenizer.add_special_tokens([_added(vocabulary.tokens[i], special=True) for i in control])
    user_defined = [vocabulary.tokens[i] for i in vocabulary.ids_of(USER_DEFINED)]
    tokenizer.add_tokens([_added(token, normalized=normalized) for token in user_defined])
    if template := _around(vocabulary):
        tokenizer.post_processor = template


def _added(token: str, *, special: bool = False, normalized: bool = False) -> Any:
    return AddedToken(token, special=special, normalized=normalized)


def _around(vocabulary: Vocabulary) -> Any:
    """A post-processor that adds the tokens of begin and end to raw text; None when there are none."""
    before = [vocabulary.bos] if vocabulary.add_bos else []
    after = [vocabulary.eos] if vocabulary.add_eos else []
    used = {vocabulary.tokens[i]: i for i in (*before, *after) if i is not None}
    if not used:
        return None
    texts = {i: token for token, i in used.items()}
    single = [*(texts[i] for i in before if i is not None), "$A", *(texts[i] for i in after if i is not None)]
    return processors.TemplateProcessing(single=single, special_tokens=list(used.items()))
