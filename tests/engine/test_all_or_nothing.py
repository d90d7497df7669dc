"""A change of rows that fails in any layer leaves every row as it was.

For each kind of change, each layer's store fails in turn; then the change is made again without a fault, and all rows,
those of the failed change included, go on to say what they say alone.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from mlx_troupe.runtime.engine.kv import plane as plane_module
from mlx_troupe.runtime.engine.kv.group import IDLE_STEPS_BEFORE_SHRINK
from mlx_troupe.runtime.engine.kv.solo import SoloBatch
from mlx_troupe.runtime.engine.kv.stores import ArraysRows, KVRows

from .conftest import random_prompts
from .rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ARCHITECTURES = ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "falcon_h1", "mamba"]
WITH_KV = [name for name in ARCHITECTURES if name != "mamba"]
AFTER = 10
"""Steps after each fault; the tiny windows are 16."""


class Injected(RuntimeError):
    """The fault of these tests."""


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, method: str, layer: int) -> Iterator[list[str]]:
    """Layer number `layer` (counted over the calls of one change) fails in `method`; yields what failed."""
    calls, failed = [0], []

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            calls[0] += 1
            if calls[0] == layer + 1:
                failed.append(type(self).__name__)
                raise Injected(f"layer {layer}")
            return original(self, *args)

        return call

    with monkeypatch.context() as patch:
        for kind in (KVRows, ArraysRows):
            if hasattr(kind, method):
                patch.setattr(kind, method, wrap(getattr(kind, method)))
        yield failed


def each_layer(rows: Rows, monkeypatch: pytest.MonkeyPatch, method: str, change: Callable[[], None]) -> int:
    """Fail every call of `method` in turn until the change succeeds; returns how many faults there were."""
    faults = 0
    while True:
        with failing(monkeypatch, method, faults) as failed:
            try:
                change()
            except Injected:
                assert failed
            else:
                assert not failed, "a fault was swallowed"
                return faults
        faults += 1
        rows.check()


def finish(rows: Rows) -> None:
    rows.check()
    rows.step(AFTER)
    rows.check()


@pytest.fixture
def running(new_batch, tiny_model, solo) -> Callable[..., Rows]:
    """Three rows, two of which share a class."""

    def start(architecture: str, classes: tuple[int, ...] = (), lengths: tuple[int, ...] = (5, 23, 40)) -> Rows:
        rows = Rows(tiny_model(architecture), new_batch(architecture, classes), lambda p, n: solo(architecture, p, n))
        for row, length in enumerate(lengths):
            rows.join(row, random_prompts(1, seed=row, lengths=(length,))[0])
        rows.step(2 if lengths else 0)
        return rows

    return start


def layers(rows: Rows, kind: type) -> int:
    groups = rows.batch._groups.values()  # type: ignore[attr-defined]
    return sum(isinstance(store, kind) for store in next(iter(groups)).stores)


@pytest.mark.parametrize("method", ["joined", "moved", "selected"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_join(architecture, method, running, monkeypatch) -> None:
    """A row longer than all others, in a full batch: slots grow, buffers are repacked, the row is written."""
    rows = running(architecture)
    group = next(iter(rows.batch._groups.values()))
    assert None not in group.rows
    prompt = random_prompts(1, seed=9, lengths=(300,))[0]
    faults = each_layer(rows, monkeypatch, method, lambda: rows.join(9, prompt, chunk=64))
    everything = len(group.stores)
    assert faults == (layers(rows, KVRows) if method == "moved" else everything)
    finish(rows)


@pytest.mark.parametrize("method", ["moved", "selected"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "falcon_h1"])
def test_room_for_several_rows(architecture, method, running, monkeypatch) -> None:
    """Slots and places for rows about to join, in a class that is there and in a new one."""
    rows = running(architecture, classes=(256, 1 << 20))
    group = rows.batch._groups[256]
    full = len(group.rows)
    assert each_layer(rows, monkeypatch, method, lambda: rows.batch.reserve([150, 600, 5, 700])) > 0
    assert len(group.rows) >= full + 2
    finish(rows)
    rows.batch.settle()
    assert list(rows.batch._groups) == [256], "a class for rows that did not come"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_join_of_a_first_row(architecture, running, monkeypatch) -> None:
    """Alone it hands over its buffers of layers that see everything; beside a place kept for another it is copied."""
    rows = running(architecture, lengths=())
    copied = each_layer(rows, monkeypatch, "joined", lambda: rows.join(0, [30, 31, 32]))
    stores = next(iter(rows.batch._groups.values())).stores
    assert copied == sum(not isinstance(store, KVRows) or store.shape.window is not None for store in stores)
    finish(rows)
    other = running(architecture, lengths=())
    other.batch.reserve([3, 3])
    assert each_layer(other, monkeypatch, "joined", lambda: other.join(0, [30, 31, 32])) == len(stores)
    finish(other)


@pytest.mark.parametrize("architecture", WITH_KV)
def test_grow(architecture, running, monkeypatch) -> None:
    """The buffers of all layers are full: the forward repacks them before anything is written."""
    monkeypatch.setattr(plane_module, "GRAIN", 0)  # no spare room in a new buffer
    rows = running(architecture, lengths=(5, 23, 250))
    group = next(iter(rows.batch._groups.values()))
    plane = group.planes[None]
    blank = plane.capacity - plane.cursor
    rows.step(blank)
    assert not plane.has_room(1)
    capacity = plane.capacity
    assert each_layer(rows, monkeypatch, "moved", rows.step) == sum(
        isinstance(store, KVRows) and store.shape.window is None for store in group.stores
    )
    assert plane.capacity > capacity
    finish(rows)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_leave_and_compaction(architecture, running, monkeypatch) -> None:
    """Leaving touches no array; the compaction that follows may fail in any layer."""
    rows = running(architecture, lengths=(5, 23, 40, 17, 33))
    for row in (1, 3, 4):
        rows.leave(row)
    for _ in range(IDLE_STEPS_BEFORE_SHRINK - 1):
        rows.batch.settle()
    assert each_layer(rows, monkeypatch, "selected", rows.batch.settle) == len(
        next(iter(rows.batch._groups.values())).stores
    )
    assert rows.batch.order == [0, 2]
    finish(rows)


@pytest.mark.parametrize("method", ["row", "joined", "selected"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_class_move(architecture, method, running, monkeypatch) -> None:
    """A row outgrows its class and moves to one that has rows and no free slot."""
    rows = running(architecture, classes=(32, 1 << 20), lengths=(5, 24, 40))
    rows.step(32 - int(rows.batch.length(1)))
    groups = rows.batch._groups
    assert {bound: group.count for bound, group in groups.items()} == {32: 2, 1 << 20: 1}
    faults = each_layer(rows, monkeypatch, method, rows.batch.settle)
    assert faults == len(groups[32].stores)
    assert {bound: group.count for bound, group in groups.items()} == {32: 1, 1 << 20: 2}
    finish(rows)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "deepseek_v3"])
def test_class_move_and_export_with_holes(architecture, running, monkeypatch) -> None:
    """Both repack a row's class first, since a row with holes cannot be cut out."""
    rows = running(architecture, classes=(32, 1 << 20), lengths=(5, 24, 40))
    rows.verify({0: 0, 1: 3, 2: 2})
    rows.step(32 - int(rows.batch.length(1)))
    assert each_layer(rows, monkeypatch, "moved", rows.batch.settle) > 0
    rows.verify({0: 1, 1: 3, 2: 0})
    if architecture != "gemma3_text":
        assert each_layer(rows, monkeypatch, "moved", lambda: rows.batch.export(2, 0, 8) and None) > 0
        assert each_layer(rows, monkeypatch, "view_of", lambda: rows.batch.export(2, 0, 8) and None) > 0
    finish(rows)


class FaultyModel:
    """Fails on the n-th call from now, if n is set."""

    def __init__(self, model: Any) -> None:
        self.model, self.fails_in = model, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.fails_in -= 1
        if self.fails_in == 0:
            raise Injected
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


@pytest.mark.parametrize("classes", [(), (16, 32, 64)], ids=["one-class", "classes"])
@pytest.mark.parametrize("architecture", ["qwen3_next", "lfm2", "falcon_h1", "mamba", "mamba2"])
def test_rewind_of_recurrent_rows(architecture, classes, running, monkeypatch) -> None:
    """A replay that fails at any of its forwards: rows keep all that was fed, and can be rewound again."""
    rows = running(architecture, classes=classes)
    model = rows.batch._model = FaultyModel(rows.model)
    rewind, counts_seen = rows.batch.rewind, {}

    def stubborn(counts: dict[int, int]) -> None:
        for call in range(1, 100):
            lengths = {row: rows.batch.length(row) for row in rows.alive}
            model.fails_in = call
            try:
                rewind(counts)
            except Injected:
                assert lengths == {row: rows.batch.length(row) for row in rows.alive}
                rows.batch.check_integrity()
            else:
                model.fails_in = 0
                counts_seen[call] = counts
                return

    monkeypatch.setattr(rows.batch, "rewind", stubborn)
    for right in ({0: 3, 1: 0, 2: 1}, {0: 0, 1: 2, 2: 0}, {0: 2, 1: 1, 2: 3}):
        rows.verify(right)
        rows.check()
    assert min(counts_seen) > 4
    finish(rows)


@pytest.mark.parametrize("architecture", ["qwen3_next", "mamba2"])
def test_rewind_row_by_row(architecture, tiny_model, solo) -> None:
    """The second row's replay fails: the first is not taken back either."""
    model = FaultyModel(tiny_model(architecture))
    rows = Rows(model, SoloBatch(model), lambda p, n: solo(architecture, p, n))
    for row, length in enumerate((17, 40)):
        rows.join(row, random_prompts(1, seed=row, lengths=(length,))[0])
    rewind = rows.batch.rewind

    def fail_first(counts: dict[int, int]) -> None:
        model.fails_in = 5
        with pytest.raises(Injected):
            rewind(counts)
        assert [rows.batch.length(row) for row in rows.alive] == [20, 43]
        rewind(counts)

    rows.batch.rewind = fail_first
    rows.verify({0: 2, 1: 2})
    finish(rows)


@pytest.mark.parametrize("architecture", ["qwen3_next", "falcon_h1"])
def test_rows_whose_rewind_failed_may_carry_on_unrewound(architecture, running) -> None:
    """All drafts were right, so taking none back after a failed attempt gives what rows alone give."""
    rows = running(architecture)
    model = rows.batch._model = FaultyModel(rows.model)
    rewind = rows.batch.rewind

    def fail_once(counts: dict[int, int]) -> None:
        model.fails_in = 3
        with pytest.raises(Injected):
            rewind(dict.fromkeys(counts, 2))
        model.fails_in = 0
        rewind(counts)

    rows.batch.rewind = fail_once
    rows.verify(dict.fromkeys(rows.alive, 3))
    finish(rows)
