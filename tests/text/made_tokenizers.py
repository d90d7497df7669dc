"""Small tokenizers of each family, made here: no file, no network."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog, again and again and again",
    "stop here. Hello, world! Hello there; 日本語のテキスト, ελληνικά, русский текст",
    "naïve café 😀😀 👩‍👩‍👧 def f(x):\n    return x + 1\n\n\n",
]
CHAT_TEMPLATE = (
    "{% if messages[0].role == 'forbidden' %}{{ raise_exception('no such role here') }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if style is defined %}{{ style }}{% endif %}{% for t in tools or [] %}{{ t.name }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def byte_level_json() -> str:
    """Like GPT-2, Llama 3, Qwen: ids 0 and 1 are special, three more added tokens are not."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_tokens(
        [AddedToken("<think>"), AddedToken("  日"), AddedToken("x\ny"), AddedToken("<s日>", special=True)]
    )
    return tokenizer.to_str()


@cache
def sentencepiece_json(*, strip: bool = True) -> str:
    """Like Llama 2 and Mistral, or Gemma without `strip`: byte fallback, a space before the first word."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS[:2] * 4, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"], "▁▁"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: index for index, name in enumerate(dict.fromkeys(names))},
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    space = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*space, normalizers.Replace(" ", "▁")])
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*stages, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer.to_str()


@cache
def metaspace_json() -> str:
    """A Unigram model with a Metaspace decoder: no text of a token alone, so it is decoded over a window."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, show_progress=False, special_tokens=["<unk>", "</s>"], unk_token="<unk>"
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer.to_str()


@cache
def odd_json() -> str:
    """Byte fallback under a decoder of no known family: decoded over a window, with characters in parts."""
    tokenizer = Tokenizer.from_str(sentencepiece_json())
    tokenizer.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer.to_str()


def wrapped(description: str, *, eos: str, chat_template: str | None = CHAT_TEMPLATE):
    """A fresh mlx-lm wrapper with the streaming class mlx-lm would choose."""
    from mlx_lm import tokenizer_utils as mlx_lm_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(description), eos_token=eos)
    tokenizer.chat_template = chat_template
    kinds = {
        "ByteLevel": mlx_lm_tokenizers.BPEStreamingDetokenizer,
        "Sequence": mlx_lm_tokenizers.SPMStreamingDetokenizer,
        "Metaspace": mlx_lm_tokenizers.NaiveStreamingDetokenizer,
    }
    kind = json.loads(description)["decoder"]["type"]
    return mlx_lm_tokenizers.TokenizerWrapper(tokenizer, kinds[kind])


def byte_level(**options):
    """A fresh byte-level wrapper."""
    return wrapped(byte_level_json(), eos="<|im_end|>", **options)


def sentencepiece(*, strip: bool = True):
    """A fresh SentencePiece-style wrapper."""
    return wrapped(sentencepiece_json(strip=strip), eos="</s>")


def metaspace():
    """A fresh wrapper whose tokens have no text alone."""
    return wrapped(metaspace_json(), eos="</s>")


def odd():
    """A fresh wrapper of no known family."""
    return wrapped(odd_json(), eos="</s>")
