"""Pages and checkpoints of every cache kind: cut, kept, restored, and taken through bytes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from mlx_troupe.runtime.clock import MonotonicClock
from mlx_troupe.runtime.engine.chunks import ChunkRunner
from mlx_troupe.runtime.engine.kv.page_bytes import from_blob, to_blob
from mlx_troupe.runtime.engine.kv.pages import StoredPage, cut, leaf_caches, restore, token_bytes
from mlx_troupe.runtime.engine.kv.staged import StagedRow
from mlx_troupe.runtime.engine.page_shelf import PageShelf
from mlx_troupe.runtime.engine.prompt_reader import PromptReader
from mlx_troupe.runtime.messages.decode import StepResult
from mlx_troupe.runtime.messages.executor import Chunk
from mlx_troupe.runtime.page_blob import PageBlob

from .bench import Bench
from .conftest import PAGE, TABLE, VOCAB, prompt_of

STATEFUL = ["gemma3_text", "gpt_oss", "qwen3_next", "qwen3_5", "lfm2", "mamba2", "falcon_h1", "mamba", "llama4"]


def addresses(page: StoredPage) -> set[int]:
    return {np.array(array, copy=False).__array_interface__["data"][0] for array in page.arrays()}


def logits(model: Any, caches: list[Any], tokens: list[int]) -> np.ndarray:
    return np.array(model(mx.array([tokens]), cache=caches)[0, -1])


@pytest.mark.parametrize("length", [5, PAGE, 2 * PAGE + 3, 5 * PAGE, 5 * PAGE + 1])
@pytest.mark.parametrize("architecture", TABLE)
def test_a_row_from_bytes_goes_on_as_the_row_itself(architecture, length, tiny_model) -> None:
    """Shorter than a window, longer, on a page's boundary and off it; through a disk's bytes and back."""
    model = tiny_model(architecture)
    row = StagedRow(model)
    pieces = [*range(PAGE, length, PAGE), length]
    pages = []
    for end in pieces:
        row.append(prompt_of(100)[row.length : end])
        pages.append(row.cut((end - 1) // PAGE * PAGE, end, checkpoint=True))
    twin = StagedRow(model)
    twin.restore([from_blob(to_blob(page)) for page in pages], length)
    assert twin.length == row.length
    for token in (7, 300, 12):
        mine, theirs = logits(model, twin.caches, [token]), logits(model, row.caches, [token])
        assert np.allclose(mine, theirs, atol=1e-5)  # a window is stored trimmed: sums run in another order
    more = prompt_of(PAGE + 3, seed=9)
    assert np.allclose(logits(model, twin.caches, more), logits(model, row.caches, more), atol=1e-4)


@pytest.mark.parametrize("architecture", STATEFUL)
def test_stored_pages_alias_nothing(architecture, tiny_model) -> None:
    """Neither while the row goes on, nor while rows restored from them do."""
    model = tiny_model(architecture)
    row = StagedRow(model)
    row.append(prompt_of(PAGE))
    page = row.cut(0, PAGE, checkpoint=True)
    before = [np.array(array) for array in page.arrays()]
    live = {np.array(array, copy=False).__array_interface__["data"][0] for array in row.arrays()}
    assert not addresses(page) & live
    twin = StagedRow(model)
    twin.restore([page], PAGE)
    for other in (row, twin):
        for token in prompt_of(40, seed=1):
            other.append([token])
    assert all(np.array_equal(a, np.array(b)) for a, b in zip(before, page.arrays(), strict=True))


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss", "llama4", "qwen3_next", "falcon_h1"])
def test_a_checkpoint_is_never_mislabelled(architecture, tiny_model) -> None:
    row = StagedRow(tiny_model(architecture))
    row.append(prompt_of(PAGE + 3))
    for wrong in (PAGE, PAGE + 2):
        with pytest.raises(ValueError, match="layers stand at"):
            row.cut(0, wrong, checkpoint=True)
    page = row.cut(PAGE, PAGE + 3, checkpoint=True)
    for used in (PAGE + 2, PAGE + 1):
        with pytest.raises(ValueError, match="no checkpoint"):
            StagedRow(tiny_model(architecture)).restore([row.cut(0, PAGE), page], used)
    with pytest.raises(ValueError, match="no checkpoint"):
        StagedRow(tiny_model(architecture)).restore([row.cut(0, PAGE)], PAGE)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_caches_are_stored_in_their_own_form(bits, tmp_path) -> None:
    """Directly built ones: bit for bit, in a fraction of the bytes, and attention goes on as before."""
    from mlx_lm import load

    from tests.models.tiny import build_tiny

    model = load(str(build_tiny("llama", tmp_path, head_dim=32)))[0]
    plain = make_prompt_cache(model)
    model(mx.array([prompt_of(3 * PAGE)]), cache=plain)
    caches = [cache.to_quantized(group_size=32, bits=bits) for cache in plain]
    pages = [cut(caches, low, low + PAGE) for low in range(0, 3 * PAGE, PAGE)]
    assert all(len(layer) == 6 for page in pages for layer in page.kv)
    assert token_bytes(caches) < token_bytes(plain) / 2
    used = 2 * PAGE + 5
    twins = [QuantizedKVCache(group_size=32, bits=bits) for _ in caches]
    restore(twins, [from_blob(to_blob(page)) for page in pages], used)
    for twin, cache in zip(twins, caches, strict=True):
        assert twin.offset == used
        for mine, theirs in zip((*twin.keys, *twin.values), (*cache.keys, *cache.values), strict=True):
            assert np.array_equal(np.array(mine), np.array(theirs[:, :, :used]))
    for cache in caches:
        cache.trim(cache.offset - used)
    assert np.array_equal(logits(model, twins, [7]), logits(model, caches, [7]))


def test_bytes_that_do_not_fit_are_refused(tiny_model) -> None:
    row = StagedRow(tiny_model("qwen3_next"))
    row.append(prompt_of(PAGE))
    blob = to_blob(row.cut(0, PAGE, checkpoint=True))
    whole = [bytes(buffer) for buffer in blob.buffers]
    for buffers in ([*whole[:-1]], [*whole, b"1234"], [whole[0][:-4], *whole[1:]]):
        with pytest.raises(ValueError, match=r"buffers for|bytes for"):
            from_blob(PageBlob(blob.layout, tuple(buffers)))


def test_a_page_of_another_form_is_refused(new_engine, tiny_model) -> None:
    engine = new_engine("llama")
    engine.shelf._form = ()
    row = StagedRow(tiny_model("llama"))
    row.append(prompt_of(PAGE))
    with pytest.raises(ValueError, match="not of this model's form"):
        engine.load_page(1, to_blob(row.cut(0, PAGE)))
    assert engine.shelf.page_ids == set()


def test_every_leaf_of_a_nested_cache_is_seen(tiny_model) -> None:
    row = StagedRow(tiny_model("falcon_h1"))
    row.append(prompt_of(PAGE))
    page = row.cut(0, PAGE, checkpoint=True)
    kinds = [type(cache).__name__ for cache in leaf_caches(row.caches)]
    assert page.state is not None
    assert (len(page.state), len(page.kv)) == (kinds.count("ArraysCache"), kinds.count("KVCache"))
    assert min(len(page.state), len(page.kv)) > 0


@pytest.mark.parametrize("overlap", ["launch", "build", "off"])
def test_the_answer_comes_before_the_kv_is_kept(overlap, new_engine, monkeypatch) -> None:
    """A row's last token is told before its pages are copied, and its neighbours lose nothing."""
    bench = Bench(new_engine("llama", overlap))
    bench.join(0, prompt_of(23))
    bench.join(1, prompt_of(9))
    bench.steps(4)
    told: list[int] = []
    put_aside = bench.engine.shelf.put_aside

    def logged(*args: Any) -> None:
        told.append(sum(isinstance(message, StepResult) for message in bench.said))
        put_aside(*args)

    monkeypatch.setattr(bench.engine.shelf, "put_aside", logged)
    launched = 6  # two joins, four steps
    bench.leave(0, (0, 1, 2))
    assert told == [launched] * 3
    bench.steps(3)
    bench.flush()
    assert bench.failed == {}


def test_a_chunk_that_fails_leaves_nothing_aside(tiny_model, monkeypatch) -> None:
    """Its first checkpoint was kept when its second piece raised: nobody will ever name it. Earlier ones stay."""
    shelf = PageShelf(PAGE)
    model = tiny_model("qwen3_next")
    runner = ChunkRunner(model, None, shelf, MonotonicClock(), PromptReader(model, VOCAB))
    tokens = tuple(prompt_of(5 * PAGE))
    ends = tuple(range(PAGE, 5 * PAGE + 1, PAGE))
    runner.run([Chunk(0, tokens[: 2 * PAGE], 0, stash=ends[:2], checkpoints=ends[:2])])
    calls, append = [0], StagedRow.append

    def second_fails(self: StagedRow, more: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("injected")
        append(self, more)

    monkeypatch.setattr(StagedRow, "append", second_fails)
    (outcome,) = runner.run([Chunk(0, tokens[2 * PAGE :], 2 * PAGE, stash=ends[2:], checkpoints=ends[2:])])
    assert outcome.error is not None
    assert calls[0] == 2
    assert shelf.adopt(0, tuple((end, 100 + end) for end in ends)) == tuple(100 + end for end in ends[2:])
    assert not shelf.rows_aside
