"""A row's own KV: buffers for its whole prompt at once, which the batch takes over; and what is dropped is freed."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_troupe.runtime.engine.kv.pages import leaf_caches
from mlx_troupe.runtime.engine.kv.staged import StagedRow
from mlx_troupe.runtime.engine.mlxlm import KVCache

from .conftest import TABLE, prompt_of

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTH = 300


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def staged(model: Any, prompt: list[int], target: int = 0) -> StagedRow:
    row = StagedRow(model, target)
    for low in range(0, len(prompt), 90):
        row.append(prompt[low : low + 90])
    return row


def plain(row: StagedRow) -> list[Any]:
    return [cache for cache in leaf_caches(row.caches) if type(cache) is KVCache]


@pytest.mark.parametrize("architecture", TABLE)
def test_a_known_target_changes_no_value(architecture, tiny_model) -> None:
    """And buffers do not grow after the first chunk."""
    model, prompt = tiny_model(architecture), prompt_of(LENGTH)
    grown, wide = staged(model, prompt), StagedRow(model, LENGTH)
    wide.append(prompt[:90])
    wide.append(prompt[90:180])
    rooms = [cache.keys.shape[2] for cache in plain(wide)]
    wide.append(prompt[180:270])
    wide.append(prompt[270:])
    assert rooms == [cache.keys.shape[2] for cache in plain(wide)]
    assert all(room > LENGTH for room in rooms)
    for mine, theirs in zip(wide.cut(0, LENGTH).kv, grown.cut(0, LENGTH).kv, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3", "qwen3"])
def test_the_first_row_of_a_batch_brings_its_buffers(architecture, tiny_model, new_batch) -> None:
    """Nothing is copied at the join, nor by the first step."""
    model, prompt = tiny_model(architecture), prompt_of(LENGTH)
    row, batch = staged(model, prompt, LENGTH), new_batch(architecture)
    held = sum(array.nbytes for array in row.arrays())
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    batch.join(0, row)
    mx.eval(batch.arrays())
    assert mx.get_peak_memory() - before < held // 4
    del row
    mx.eval(batch.forward(mx.array([[5]])))
    assert mx.get_active_memory() - before < held // 4
    assert mx.get_peak_memory() - before < held // 2


def test_rows_that_join_from_one_source_share_nothing(tiny_model, new_batch) -> None:
    """Also when the first of them took over the source's buffers and has decoded meanwhile."""
    model, prompt = tiny_model("llama"), prompt_of(LENGTH)
    row = staged(model, prompt, LENGTH)
    kept = [np.array(array) for array in row.arrays()]
    batch = new_batch("llama")
    batch.join(0, row)
    for token in (7, 8, 9):
        mx.eval(batch.forward(mx.array([[token]])))
    assert all(np.array_equal(a, b) for a, b in zip(kept, row.arrays(), strict=True))
    batch.join(1, row)
    mx.eval(batch.forward(mx.array([[3]] * len(batch.order))))
    for mine, theirs in zip(batch.export(0, 0, LENGTH).kv, batch.export(1, 0, LENGTH).kv, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next", "falcon_h1"])
def test_a_batch_without_rows_frees_its_buffers_at_once(architecture, tiny_model, new_batch, no_gc) -> None:
    """Not when Python's collector happens to run: no cycle holds them."""
    model, prompt = tiny_model(architecture), prompt_of(LENGTH)
    batch = new_batch(architecture)
    row = staged(model, prompt)
    before = mx.get_active_memory() - sum(array.nbytes for array in row.arrays())
    batch.join(0, row)
    del row
    mx.eval(batch.forward(mx.array([[5]])))
    batch.leave(0)
    mx.eval(mx.array(0))
    assert mx.get_active_memory() - before < 64 << 10
