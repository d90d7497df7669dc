"""A byte-level tokenizer of any size, made without a corpus, and its files."""

from __future__ import annotations

import itertools
import json
import string
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EOS = "<|im_end|>"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", EOS)
BYTES = 256
EOS_ID = BYTES + SPECIAL_TOKENS.index(EOS)
"""Ids 0-255 are the bytes (in the order of `tokenizers`' alphabet), 256-258 the special tokens."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`; every id below `vocab` decodes to text."""
    (folder / "tokenizer.json").write_text(tokenizer_json(vocab))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": SPECIAL_TOKENS[0],
        "additional_special_tokens": [SPECIAL_TOKENS[1]],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def tokenizer_json(vocab: int) -> str:
    """Bytes, special tokens, then merges of lower-case letters until `vocab` tokens exist."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if vocab < EOS_ID + 1:
        raise ValueError(f"a byte-level vocabulary has at least {EOS_ID + 1} tokens, not {vocab}")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *SPECIAL_TOKENS]
    merges = list(itertools.islice(_merges(), vocab - len(tokens)))
    tokens += [left + right for left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer.to_str()


def _merges() -> Iterator[tuple[str, str]]:
    letters = string.ascii_lowercase
    words = ["\u0120", *letters]
    for _ in range(3):
        longer = []
        for left, right in itertools.product(words, letters):
            longer.append(left + right)
            yield left, right
        words = longer
