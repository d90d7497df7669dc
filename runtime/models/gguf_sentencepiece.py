"""SentencePiece tokenizers as BPE with byte fallback.

The file has pieces and scores, no merges. Two neighbours may be joined whenever the joint text is a piece,
best score first, which is BPE with one merge for every way to cut a piece in two, in the order of scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers

from .errors import InvalidModel
from .gguf_bpe import add_special_tokens

if TYPE_CHECKING:
    from .gguf_tokenizer import Vocabulary

SPACE = "\u2581"
"""SentencePiece's mark for a space."""
MAX_PIECE = 1024
"""Pieces of more characters are never joined from parts."""


def sentencepiece_tokenizer(vocabulary: Vocabulary, *, space_prefix: bool) -> Tokenizer:
    """Build the tokenizer; `space_prefix` puts a space before the text (Llama does, Gemma does not)."""
    tokens = vocabulary.tokens
    unknown = None if vocabulary.unknown is None else tokens[vocabulary.unknown]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges(vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replace = normalizers.Replace(" ", SPACE)
    prepend = [normalizers.Prepend(SPACE)] if space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, replace])
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    add_special_tokens(tokenizer, vocabulary, normalized=not space_prefix)
    return tokenizer


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    from .gguf_tokenizer import NORMAL, UNUSED

    if vocabulary.scores is None:
        raise InvalidModel("This SentencePiece tokenizer has no scores. Download the file again.")
    scores = vocabulary.scores
    pieces = np.array(vocabulary.ids_of(NORMAL, UNUSED), dtype=np.int64)
    ids = {vocabulary.tokens[i]: int(i) for i in pieces}
    best_first = pieces[np.argsort(-scores[pieces], kind="stable")]
    return [pair for i in best_first for pair in _cuts(vocabulary.tokens[i], ids)]


def _cuts(piece: str, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to cut `piece` into two pieces, in the order of their ids."""
    if len(piece) > MAX_PIECE:
        return []
    halves = ((piece[:middle], piece[middle:]) for middle in range(1, len(piece)))
    found = [(left, right) for left, right in halves if left in ids and right in ids]
    return sorted(found, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
