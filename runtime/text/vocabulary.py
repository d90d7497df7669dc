"""Every token's own text, read from a tokenizer once, so that a stream needs one list access a token.

Two families of tokenizers turn each token into bytes by itself: byte-level BPE (GPT-2, Llama 3, Qwen, ...)
and SentencePiece with byte fallback (Llama 2, Mistral, Gemma, ...). For them a table of pieces is made here
from the decoder that is really in use, not from the file: transformers may replace it. mlx-lm's streaming
classes know the same two families, but they trim a leading space from byte-level text, write special tokens
out, turn a NUL byte into two others, and copy the whole text at every token. All other tokenizers (WordPiece,
Metaspace, Python ones) give no table and are decoded over a sliding window.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from .tokenizer_types import DECODE_METHODS, rust_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from .tokenizer_types import RustTokenizer, Wrapper

# str: whole characters. bytes: not UTF-8 by itself, to be joined with its neighbours.
Piece: TypeAlias = "str | bytes"
ToBytes: TypeAlias = "Callable[[str], bytes]"


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """What the event loop must know of a tokenizer; plain data that threads may share.

    Attributes:
        pieces: the text of each id below the model's vocabulary size; None when tokens have none alone.
        strips_space: decoding a whole text drops one space at its start.
        special_tokens: ids left out of text, as `decode(skip_special_tokens=True)` does.
        eos_tokens: ids that end a generation.
    """

    pieces: list[Piece] | None
    strips_space: bool
    special_tokens: frozenset[int]
    eos_tokens: frozenset[int]


def read_vocabulary(wrapper: Wrapper, vocab_size: int) -> Vocabulary:
    """Read `wrapper`'s tokens; ids it does not know, up to `vocab_size`, have no text."""
    backend = rust_tokenizer(wrapper, DECODE_METHODS)
    pieces, strips_space = None, False
    if backend is not None and (rule := _rule_of(backend)) is not None:
        to_bytes, strips_space = rule
        pieces = [_piece(backend.id_to_token(token), to_bytes) for token in range(vocab_size)]
    return Vocabulary(
        pieces=pieces,
        strips_space=strips_space,
        special_tokens=_special_tokens(wrapper, backend),
        eos_tokens=frozenset(int(token) for token in wrapper.eos_token_ids),
    )


def _special_tokens(wrapper: Wrapper, backend: RustTokenizer | None) -> frozenset[int]:
    if backend is None:
        return frozenset(wrapper.all_special_ids)
    return frozenset(token for token, added in backend.get_added_tokens_decoder().items() if added.special)


def _piece(token: str | None, to_bytes: ToBytes) -> Piece:
    if token is None:
        return ""
    piece = to_bytes(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return piece


def _rule_of(backend: RustTokenizer) -> tuple[ToBytes, bool] | None:
    """How the decoder turns one token into bytes, and whether it drops the text's first space."""
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    stages = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [stage["type"] for stage in stages] == ["ByteLevel"]:
        return _byte_level, False
    return _sentencepiece(stages)


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_BYTE_OF_CHAR).encode("latin-1")
    except UnicodeEncodeError:  # an added token written plainly
        return token.encode()


def _byte_table() -> dict[int, int]:
    """Byte of each character that stands for one, by GPT-2's `bytes_to_unicode`; others map to U+FFFF."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {char: char if char in plain else 0xFFFF for char in range(0x100)}
    moved = (byte for byte in range(0x100) if byte not in plain)
    return table | {0x100 + index: byte for index, byte in enumerate(moved)}


_BYTE_OF_CHAR = _byte_table()


def _sentencepiece(stages: list[dict[str, object]]) -> tuple[ToBytes, bool] | None:
    """The rule of Replace, ByteFallback, Fuse and perhaps Strip, in this order; None for anything else."""
    rest = list(stages)
    replacements: list[tuple[str, str]] = []
    while rest and (pair := _replacement(rest[0])) is not None:
        replacements.append(pair)
        rest.pop(0)
    names = [stage["type"] for stage in rest]
    if names[:2] != ["ByteFallback", "Fuse"] or len(rest) > 3:
        return None
    if len(rest) == 3 and rest[2] != {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
        return None

    def to_bytes(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        byte = _fallback_byte(token)
        return token.encode() if byte is None else byte

    return to_bytes, len(rest) == 3


def _replacement(stage: dict[str, object]) -> tuple[str, str] | None:
    pattern = stage.get("pattern")
    if stage["type"] != "Replace" or not isinstance(pattern, dict) or "String" not in pattern:
        return None
    return str(pattern["String"]), str(stage["content"])


def _fallback_byte(token: str) -> bytes | None:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return bytes.fromhex(token[3:5])
    except ValueError:
        return None
