"""Pages: exported from prefill or from a leaving row, named, restored into another row, dropped.

A row that starts from pages says, token for token, what a row says that computed its whole prompt.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from mlx_troupe.runtime.engine.kv.pages import has_state, leaf_caches, unstorable
from mlx_troupe.runtime.engine.kv.shapes import KVShape, learn_shapes
from mlx_troupe.runtime.engine.kv.staged import StagedRow
from mlx_troupe.runtime.engine.mlxlm import CacheList, KVCache
from mlx_troupe.runtime.messages.executor import NO_PAGE, Chunk

from .bench import Bench, settled_memory
from .conftest import PAGE, prompt_of

PAGEABLE = ["llama", "deepseek_v2", "deepseek_v3", "gemma2"]
COUNT = 20


def restored(bench: Bench, row: int, tokens: list[int], pages: list[int], use: int) -> None:
    """Start `row` with its first `use` tokens out of pages, and let it decode."""
    chunk = Chunk(row, tuple(tokens[use:-1]), use, tuple(pages[: -(-use // PAGE)]), use)
    outcome = bench.chunk(chunk)
    assert outcome.error is None
    assert not outcome.restore_missed
    bench.plan(joins=(bench.joining(row, tokens),), discards=(row,))


def content(bench: Bench, page: int) -> list[np.ndarray]:
    return [np.array(array) for array in bench.engine.shelf._pages[page].arrays()]


@pytest.mark.parametrize("architecture", PAGEABLE)
def test_a_row_restored_from_a_left_row_equals_recomputation(architecture, new_engine, solo) -> None:
    """Whole pages, the middle of one, one token of the next, and as many tokens as can be reused."""
    bench = Bench(new_engine(architecture))
    prompt = prompt_of(23)
    bench.join(0, prompt)
    bench.join(9, prompt_of(40))
    bench.steps(COUNT)
    bench.flush()
    known = (prompt + bench.tokens[0])[: len(prompt) + COUNT]
    count = (len(known) - 1) // PAGE
    bench.leave(0, tuple(range(count)))
    ids = [50 + index for index in range(count)]
    assert bench.adopt(0, tuple(enumerate(ids))) == ()
    uses = [PAGE, 2 * PAGE, 2 * PAGE + 1, 3 * PAGE - 1, count * PAGE - 3, count * PAGE]
    for row, use in enumerate(uses, start=1):
        tokens = known[: use + 1 + row % 2]
        restored(bench, row, tokens, ids, use)
    bench.steps(COUNT)
    bench.flush()
    for row in [*range(1, len(uses) + 1), 9]:
        expected = solo(architecture, bench.prompts[row], len(bench.tokens[row]))
        assert bench.tokens[row] == expected, f"row {row}"


@pytest.mark.parametrize("architecture", PAGEABLE)
def test_pages_of_prefill_serve_another_row_at_once(architecture, new_engine, solo) -> None:
    """The first row is still being prefilled when the second starts from its pages and goes another way."""
    bench = Bench(new_engine(architecture))
    prompt = prompt_of(70)
    assert bench.chunk(Chunk(0, tuple(prompt[:36]), 0, stash=(8, 16, 24, 32))).error is None
    assert bench.adopt(0, ((0, 1), (1, 2), (2, 3), (3, NO_PAGE))) == ()
    other = [*prompt[:21], *prompt_of(9)]
    restored(bench, 1, other, [1, 2, 3], 21)
    assert bench.chunk(Chunk(0, tuple(prompt[36:-1]), 36)).error is None
    bench.plan(joins=(bench.joining(0, prompt),), discards=(0,))
    bench.steps(COUNT)
    bench.flush()
    for row in (0, 1):
        assert bench.tokens[row] == solo(architecture, bench.prompts[row], len(bench.tokens[row]))


def test_adopting_names_frees_and_leaves_aside(new_engine) -> None:
    """Listed pages are named or freed, those not listed stay aside, those that never were are lost."""
    bench = Bench(new_engine())
    bench.stage(0, prompt_of(40), stash_pages=(0, 1, 2))
    engine = bench.engine
    assert bench.adopt(0, ((0, 7), (1, NO_PAGE), (4, 8), (5, NO_PAGE))) == (8,)
    assert set(engine.shelf._pages) == {7}
    assert set(engine.shelf._aside[0]) == {24}
    assert bench.adopt(0, ((2, 9),)) == ()
    assert not engine.shelf._aside
    assert bench.adopt(0, ((2, 10),)) == (10,)
    assert bench.adopt(77, ((0, 11),)) == (11,)
    assert bench.adopt(77, ((0, NO_PAGE),)) == ()
    engine.drop((7, 9, 9, 12345))
    assert not engine.shelf._pages


def test_a_missing_page_is_a_miss_and_nothing_runs(new_engine, solo) -> None:
    bench = Bench(new_engine())
    prompt = prompt_of(40)
    bench.stage(0, prompt, stash_pages=(0, 1))
    bench.adopt(0, ((0, 1), (1, 2)))
    bench.engine.drop((2,))
    outcome = bench.chunk(Chunk(1, tuple(prompt[16:-1]), 16, (1, 2), 16))
    assert outcome.restore_missed
    assert outcome.error is None
    assert 1 not in bench.engine._staged
    bench.join(1, prompt)
    bench.steps(5)
    bench.flush()
    assert bench.tokens[1] == solo("llama", prompt, 6)


def test_pages_too_short_for_what_is_wanted_of_them_are_an_error(new_engine) -> None:
    bench = Bench(new_engine())
    prompt = prompt_of(40)
    bench.stage(0, prompt, stash_pages=(0,))
    bench.adopt(0, ((0, 1),))
    outcome = bench.chunk(Chunk(1, tuple(prompt[9:-1]), 9, (1,), 9))
    assert outcome.error is not None
    assert "hold 8 tokens, not 9" in outcome.error
    assert 1 not in bench.engine._staged


@pytest.mark.parametrize("architecture", ["llama", "llama4", "gemma2"])
def test_pages_that_cannot_be_cut_are_lost_and_the_row_leaves(architecture, new_engine, solo, monkeypatch) -> None:
    """A page beyond the row, or a device that fails: the row leaves all the same, its neighbour does not notice."""
    bench = Bench(new_engine(architecture))
    for row, length in enumerate((23, 40, 5)):
        bench.join(row, prompt_of(length))
    bench.leave(0, (0, 99))
    assert bench.adopt(0, ((0, 1), (99, 2))) == (2,), "the piece that can be cut is kept"
    with monkeypatch.context() as patch:
        patch.setattr(bench.engine._batch, "export", lambda *args: 1 / 0)
        bench.leave(1, (0,))
    assert bench.adopt(1, ((0, 3),)) == (3,)
    assert [row for row in bench.engine._batch.order if row is not None] == [2]
    bench.steps(6)
    bench.flush()
    assert bench.failed == {}
    assert bench.tokens[2] == solo(architecture, prompt_of(5), len(bench.tokens[2]))


@pytest.mark.parametrize("architecture", PAGEABLE)
def test_memory_returns_when_pages_are_dropped(architecture, new_engine) -> None:
    """Pages own no more than their bytes, though the row's buffers are gone; dropping them frees all."""
    page = 256
    bench = Bench(new_engine(architecture, page=page))
    base = settled_memory()
    prompt = prompt_of(3 * page + 5, seed=1)
    bench.stage(0, prompt, stash_pages=(0, 1, 2), chunk=1024)
    bench.adopt(0, ((0, 1), (1, 2), (2, NO_PAGE)))
    bench.plan(joins=(bench.joining(0, prompt),), discards=(0,))
    bench.steps(2)
    bench.leave(0, (0, 1, 2))
    bench.adopt(0, ((0, 3), (1, NO_PAGE), (2, NO_PAGE)))
    bench.flush()
    layer_bytes = [sum(array.nbytes for array in pair) for pair in bench.engine.shelf._pages[1].kv]
    held = settled_memory() - base
    slack = 2 * len(layer_bytes) * 4096 + 8192  # buffers are whole pages of memory
    few = 4096  # a model may keep small arrays of its last forward (see `models.light_cpu`)
    assert 3 * sum(layer_bytes) - few <= held <= 3 * sum(layer_bytes) + 3 * slack
    bench.engine.drop((1, 2, 3))
    assert settled_memory() - base <= 8192


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_a_stored_page_never_changes(architecture, new_engine) -> None:
    """Neither while its row decodes on, nor while rows restored from it do, nor when all have left."""
    bench = Bench(new_engine(architecture))
    prompt = prompt_of(40)
    bench.stage(0, prompt, stash_pages=(0, 1, 2, 3))
    bench.adopt(0, tuple((index, index + 1) for index in range(4)))
    before = {page: content(bench, page) for page in range(1, 5)}
    bench.plan(joins=(bench.joining(0, prompt),), discards=(0,))
    restored(bench, 1, prompt, [1, 2, 3, 4], 32)
    restored(bench, 2, [*prompt[:30], 44, 45], [1, 2, 3, 4], 30)
    bench.steps(100)
    bench.leave(0, (0, 1))
    bench.adopt(0, ((0, 9), (1, 10)))
    left = content(bench, 9)
    bench.steps(100)
    for row in (1, 2):
        bench.leave(row)
    bench.flush()
    assert all(np.array_equal(a, b) for a, b in zip(left, content(bench, 9), strict=True))
    for page, arrays in before.items():
        assert all(np.array_equal(a, b) for a, b in zip(arrays, content(bench, page), strict=True))


def test_exporting_does_not_make_the_next_step_copy_the_buffers(new_engine) -> None:
    """DESIGN "aliases copy": an export is evaluated and its view dropped before the step is built."""
    bench = Bench(new_engine(classes=(), page=256))
    prompt = prompt_of(2, seed=1) * 1600
    for row in (0, 1):
        bench.stage(row, prompt, chunk=1024)
        bench.plan(joins=(bench.joining(row, prompt),), discards=(row,))
    bench.steps(2)
    bench.flush()
    keys = bench.engine._batch._groups[1 << 62].stores[0].keys
    layer_bytes = 2 * keys.nbytes
    page_bytes = 2 * 2 * 256 * keys.shape[1] * keys.shape[3] * 4
    bench.engine.shelf.put_aside(0, 1024, partial(bench.engine._batch.export, 0))
    base = settled_memory()
    mx.reset_peak_memory()
    bench.plan()
    bench.flush()
    assert mx.get_peak_memory() - base < layer_bytes // 2 + page_bytes


def test_caches_in_lists_can_be_cut_and_restored() -> None:
    """Models that keep two KV caches a layer (deepseek_v32, longcat): every one of them has its share of a page."""

    class Model:
        def make_cache(self) -> list[CacheList]:
            return [CacheList(KVCache(), KVCache()), CacheList(KVCache(), KVCache())]

        def __call__(self, tokens: mx.array, cache: list[CacheList]) -> mx.array:
            for layer, both in enumerate(cache):
                for part, one in enumerate(both.caches):
                    new = tokens[:, None, :, None].astype(mx.float32) * (1 + part + 10 * layer)
                    one.update_and_fetch(mx.repeat(new, 2, axis=3), new)
            return tokens

        layers = (1, 2)

    model = Model()
    shapes = learn_shapes(model)
    row = StagedRow(model)
    row.append(list(range(20)))
    assert (has_state(row.caches), unstorable(row.caches)) == (False, None)
    pages = [row.cut(0, 8), row.cut(8, 16)]
    assert [len(page.kv) for page in pages] == [4, 4]
    twin = StagedRow(model)
    twin.restore(pages, 13)
    twin.append(list(range(13, 20)))
    for mine, theirs in zip(twin.cut(0, 20).kv, row.cut(0, 20).kv, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert [type(part) for shape in shapes for part in shape.parts] == [KVShape] * 4
    assert list(leaf_caches(twin.caches))[3].keys.shape[3] == 2
