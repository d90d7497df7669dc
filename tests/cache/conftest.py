"""Runtimes of tiny models with a prefix cache, and mlx-lm's own answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mlx_troupe.runtime import Generation, Runtime, SamplingParams
from tests.runtime.conftest import alone, folder_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["alone", "folder_of"]

PAGE = 16
CHUNK = 48
GREEDY = SamplingParams(temperature=0)
TABLE = (  # noqa: SIM905
    "llama qwen3 deepseek_v2 deepseek_v3 gemma3_text gpt_oss qwen3_next qwen3_5 lfm2 mamba2 falcon_h1 mamba llama4 "
    "gemma3n"
).split()
"""The architectures of `models.md`, and gemma3n."""


@pytest.fixture
def runtime_of(folder_of: Callable[[str], Path], tmp_path: Path) -> Callable[..., Runtime]:
    """A runtime of an architecture with small pages and chunks; `disk=True` gives it a disk tier."""

    def make(architecture: str, *, disk: bool = False, **settings: Any) -> Runtime:
        given: dict[str, Any] = {"page_tokens": PAGE, "prefill_chunk_tokens": CHUNK, "length_classes": (64, 256, 1024)}
        if disk:
            given |= {"cache_dir": str(tmp_path / "prefixes"), "cache_disk_bytes": 1 << 30}
        return Runtime(**({"model": str(folder_of(architecture))} | given | settings))

    return make


async def ask(runtime: Runtime, prompt: list[int], count: int = 12, **options: Any) -> tuple[list[int], int]:
    """Greedy tokens, and how many prompt tokens came from the cache."""
    generation = Generation(tokens=tuple(prompt), sampling=GREEDY, max_tokens=count, ignore_eos=True, **options)
    choice = (await runtime.complete(generation)).choices[0]
    assert choice.usage is not None
    return list(choice.tokens), choice.usage.cached_tokens
