"""Tiny models, made once a session, and engines and batches over them."""

from __future__ import annotations

import random
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from mlx_troupe.runtime.clock import MonotonicClock
from mlx_troupe.runtime.engine.engine import MlxEngine
from mlx_troupe.runtime.engine.kv.shapes import learn_shapes
from mlx_troupe.runtime.engine.kv.split import attention
from mlx_troupe.runtime.engine.mlxlm import bind_attention
from mlx_troupe.runtime.engine.probe import Layout
from mlx_troupe.runtime.engine_protocol import EngineFacts
from tests.models.tiny import build_tiny

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlx_troupe.runtime.engine.kv.batch import Batch

VOCAB = 512
CLASSES = (16, 64, 256)
"""Small length classes, so that short rows move between them."""
PAGE = 8
TABLE = [
    "llama",
    "qwen3",
    "deepseek_v2",
    "deepseek_v3",
    "gemma3_text",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5",
    "lfm2",
    "mamba2",
    "falcon_h1",
    "mamba",
    "llama4",
    "gemma3n",
]
"""The architectures of `models.md`, and gemma3n."""
SPLIT = {"llama", "qwen2", "qwen3", "deepseek_v2", "gemma3_text", "cohere2", "gpt_oss", "gemma3n", "phi3"}
ROW_BY_ROW = {"llama4": "ChunkedKVCache cannot share a batch", "gemma2": "broadcast"}
"""Architectures whose classes share a forward, and those that are not batched (and why). All others: a forward a class.

Tests are built on this and not on the probe, which would hide a fault in the batched code behind its fallback.
"""
LENGTHS = (1, 2, 5, 17, 23, 33, 40, 70, 130)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """A loaded tiny model by architecture; loaded once a session."""
    from mlx_lm import load

    loaded: dict[str, Any] = {}

    def get(architecture: str) -> Any:
        if architecture not in loaded:
            folder = build_tiny(architecture, tmp_path_factory.mktemp(architecture), vocab=VOCAB)
            loaded[architecture] = load(str(folder))[0]
        return loaded[architecture]

    return get


@pytest.fixture(scope="session")
def solo(tiny_model: Callable[[str], Any]) -> Callable[[str, list[int], int], list[int]]:
    """Greedy tokens of mlx_lm alone, computed once and as far as somebody asks."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    known: dict[tuple[str, tuple[int, ...]], tuple[list[int], Iterator[Any]]] = {}

    def get(architecture: str, prompt: list[int], count: int) -> list[int]:
        key = (architecture, tuple(prompt))
        if key not in known:
            known[key] = [], generate_step(mx.array(prompt), tiny_model(architecture), max_tokens=4096)
        said, more = known[key]
        said += [int(token) for token, _ in islice(more, max(0, count - len(said)))]
        return said[:count]

    return get


@pytest.fixture(scope="session")
def layout_of(tiny_model: Callable[[str], Any]) -> Callable[[str], Layout]:
    """The layout each architecture must get; `test_probe` holds the probe to it."""
    known: dict[str, Layout] = {}

    def make(architecture: str) -> Layout:
        model = tiny_model(architecture)
        bind_attention(attention)
        if architecture in ROW_BY_ROW:
            return Layout("row-by-row", ROW_BY_ROW[architecture], None)
        way = "split" if architecture in SPLIT else "per-class"
        return Layout(way, "as the table says", learn_shapes(model))

    def get(architecture: str) -> Layout:
        if architecture not in known:
            known[architecture] = make(architecture)
        return known[architecture]

    return get


@pytest.fixture
def new_batch(tiny_model: Callable[[str], Any], layout_of: Callable[[str], Layout]) -> Callable[..., Batch]:
    """An empty batch of the architecture's layout."""

    def make(architecture: str, classes: tuple[int, ...] = CLASSES) -> Batch:
        return layout_of(architecture).new_batch(tiny_model(architecture), classes)()

    return make


@pytest.fixture
def new_engine(tiny_model: Callable[[str], Any], layout_of: Callable[[str], Layout]) -> Callable[..., MlxEngine]:
    """An engine as `build_engine` makes it, without measuring again."""

    def make(
        architecture: str = "llama", overlap: str = "launch", *, classes: tuple[int, ...] = CLASSES, page: int = PAGE
    ) -> MlxEngine:
        model, layout = tiny_model(architecture), layout_of(architecture)
        facts = EngineFacts(vocab_size=VOCAB, context_length=4096, overlap=overlap, layout=layout.describe())
        return MlxEngine(model, layout.new_batch(model, classes), facts, page_tokens=page, clock=MonotonicClock())

    return make


def random_prompts(count: int, *, seed: int = 7, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Prompts of mixed lengths over the tiny vocabulary."""
    rng = random.Random(seed)
    return [[rng.randrange(10, VOCAB - 10) for _ in range(rng.choice(lengths))] for _ in range(count)]


def prompt_of(length: int, *, seed: int | None = None) -> list[int]:
    """A prompt of so many tokens."""
    return random_prompts(1, seed=length if seed is None else seed, lengths=(length,))[0]
