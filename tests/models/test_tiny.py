"""The tiny models are what other tests take them for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.tiny_tokenizer import EOS_ID

from .tiny import ARCHITECTURES, build_tiny

if TYPE_CHECKING:
    from pathlib import Path

CACHES = {
    "llama": {"KVCache"},
    "qwen3": {"KVCache"},
    "deepseek_v2": {"KVCache"},
    "deepseek_v3": {"KVCache"},
    "gemma3_text": {"RotatingKVCache", "KVCache"},
    "gemma3n": {"RotatingKVCache", "KVCache"},
    "gpt_oss": {"RotatingKVCache", "KVCache"},
    "qwen3_next": {"ArraysCache", "KVCache"},
    "qwen3_5": {"ArraysCache", "KVCache"},
    "lfm2": {"ArraysCache", "KVCache"},
    "mamba": {"ArraysCache"},
    "mamba2": {"ArraysCache"},
    "falcon_h1": {"CacheList"},
    "llama4": {"ChunkedKVCache", "KVCache"},
}


def greedy(model: object, prompt: list[int], count: int) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("head_dim", [16, 32])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_it_loads_and_greedy_text_varies(arch: str, head_dim: int, tmp_path: Path) -> None:
    model, tokenizer = mlx_lm.load(str(build_tiny(arch, tmp_path, head_dim=head_dim)))
    prompt = tokenizer.encode("The quick brown fox jumps over the lazy dog")
    tokens = greedy(model, prompt, 48)
    assert len(set(tokens)) >= 10
    assert EOS_ID not in tokens
    assert max(tokens) < 512
    assert tokenizer.eos_token_ids == {EOS_ID}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    if arch in CACHES:
        assert {type(cache).__name__ for cache in make_prompt_cache(model)} == CACHES[arch]


def test_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    folders = [build_tiny("qwen3_next", tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1))]
    first, again, other = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == again
    assert first != other


def test_other_vocabulary_sizes(tmp_path: Path) -> None:
    for vocab in (259, 1000, 49152):
        _, tokenizer = mlx_lm.load(str(build_tiny("llama", tmp_path / str(vocab), vocab=vocab)))
        assert len(tokenizer.get_vocab()) == vocab
        text = "Zoë saw 42 😀s\n  there"
        assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(ValueError, match="at least 259"):
        build_tiny("llama", tmp_path / "small", vocab=258)
