"""Estimates against real buffers: what a batch, a staged row and a growing batch really take."""

from __future__ import annotations

import gc
import weakref

import mlx.core as mx
import pytest

from mlx_troupe.runtime.engine.footprint import kv_layout
from mlx_troupe.runtime.engine.kv.batch import RowBatch
from mlx_troupe.runtime.engine.kv.shapes import learn_shapes
from mlx_troupe.runtime.engine.kv.staged import StagedRow
from mlx_troupe.runtime.kv_estimate import (
    KVKind,
    KVLayout,
    alone_bytes,
    batch_bytes,
    capacity,
    chunk_within,
    class_of,
    grown_bytes,
    longest_alone,
    slots_for,
    staged_bytes,
    transient_bytes,
)

CLASSES = (64, 256, 1024)
ARCHITECTURES = ("llama", "gemma3_text", "qwen3_next")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("lengths", [(3,), (3, 40, 41), (200, 10, 11, 12, 13), (500,), (500, 5, 170, 171, 172)])
def test_a_batch_takes_what_was_estimated(tiny_model, architecture: str, lengths: tuple[int, ...]) -> None:
    model = tiny_model(architecture)
    shapes = learn_shapes(model)
    layout = kv_layout(model, shapes, CLASSES)
    assert layout is not None
    batch = RowBatch(model, shapes, CLASSES)
    for row, length in enumerate(sorted(lengths)):
        staged = StagedRow(model)
        staged.append([1] * length)
        batch.join(row, staged)
    taken = sum(array.nbytes for array in batch.arrays())
    assert taken == batch_bytes(layout, lengths)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_growing_batch_never_takes_more_than_estimated(tiny_model, architecture: str) -> None:
    model = tiny_model(architecture)
    shapes = learn_shapes(model)
    layout = kv_layout(model, shapes, ())
    assert layout is not None
    batch = RowBatch(model, shapes, ())
    lengths = [5, 120, 121]
    for row, length in enumerate(lengths):
        staged = StagedRow(model)
        staged.append([1] * length)
        batch.join(row, staged)
    for step in range(1, 300):
        mx.eval(batch.forward(mx.ones((len(batch.order), 1), mx.int32)), batch.arrays())
        grown = [length + step for length in lengths]
        taken = sum(array.nbytes for array in batch.arrays())
        assert taken <= batch_bytes(layout, grown)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("length", [1, 7, 255, 256, 257, 700])
def test_a_staged_row_takes_what_was_estimated(tiny_model, architecture: str, length: int) -> None:
    model = tiny_model(architecture)
    layout = kv_layout(model, learn_shapes(model), CLASSES)
    assert layout is not None
    staged = StagedRow(model, length)
    done = 0
    while done < length:
        count = min(100, length - done)
        staged.append([1] * count)
        done += count
        taken = sum(array.nbytes for array in staged.arrays())
        wanted = length if done > 100 else done
        assert taken <= staged_bytes(layout, wanted, 100)
        assert taken >= staged_bytes(layout, wanted, 100) - 2 * 256 * layout.token_bytes


PLAIN = KVLayout(kinds=(KVKind(None, 100),), activation_bytes=1000.0, score_bytes=10.0)


@pytest.mark.parametrize(
    ("estimate", "expected"),
    [
        (capacity(KVKind(None, 1), 0), 256),
        (capacity(KVKind(None, 1), 127), 256),
        (capacity(KVKind(None, 1), 128), 512),
        (capacity(KVKind(64, 1), 5), 192),
        (capacity(KVKind(64, 1), 5000), 192),
        (slots_for(1), 1),
        (slots_for(5), 6),
        (slots_for(300), 320),
        (class_of(KVLayout(classes=CLASSES), 48), 64),
        (class_of(KVLayout(classes=CLASSES), 49), 256),
        (class_of(KVLayout(classes=CLASSES), 5000), 1024),
        (class_of(KVLayout(), 5000), 0),
        (batch_bytes(PLAIN, []), 0),
        (batch_bytes(PLAIN, [10, 20, 30, 40, 50]), 6 * 256 * 100),
        (batch_bytes(KVLayout(kinds=PLAIN.kinds, shared=False), [10, 200]), (256 + 512) * 100),
        (batch_bytes(KVLayout(state_bytes=7), [10, 20, 30]), 21),
        (grown_bytes(PLAIN, [10], 50), 0),
        (grown_bytes(PLAIN, [100], 50), 512 * 100),
        (transient_bytes(PLAIN, 10, 90), 10 * (1100 + 1000)),
        (chunk_within(PLAIN, 0, 0), 0),
        (chunk_within(KVLayout(), 1, 0), 1 << 30),
    ],
)
def test_formulas(estimate: float, expected: float) -> None:
    assert estimate == expected


@pytest.mark.parametrize("depth", [0, 100, 10_000])
@pytest.mark.parametrize("free", [10_000, 1_000_000, 100_000_000])
def test_a_chunk_within_bounds_is_the_largest(depth: int, free: int) -> None:
    def cost(tokens: int) -> float:
        return transient_bytes(PLAIN, tokens, depth) + tokens * PLAIN.token_bytes

    found = chunk_within(PLAIN, free, depth)
    assert found == 0 or cost(found) <= free
    assert cost(found + 1) > free


@pytest.mark.parametrize("free", [100_000, 1_000_000, 50_000_000])
def test_the_longest_row_is_the_longest(free: int) -> None:
    found = longest_alone(PLAIN, free, 32, 2.0, 100_000)
    assert found == 0 or alone_bytes(PLAIN, found, 32, 2.0) <= free
    assert alone_bytes(PLAIN, found + 1, 32, 2.0) > free


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_buffers_go_without_a_garbage_collection(tiny_model, new_batch, architecture: str) -> None:
    """A dead group in a reference cycle would hold its buffers until Python happens to collect."""
    model = tiny_model(architecture)
    batch = new_batch(architecture, (64, 256))
    gc.collect()
    gc.disable()
    try:
        for row, length in enumerate((5, 150)):
            staged = StagedRow(model)
            staged.append([1] * length)
            batch.join(row, staged)
        mx.eval(batch.forward(mx.ones((2, 1), mx.int32)), batch.arrays())
        stores = [weakref.ref(store) for group in batch._groups.values() for store in group.stores]
        for row in range(2):
            batch.leave(row)
        assert stores
        assert [store() for store in stores] == [None] * len(stores)
    finally:
        gc.enable()
