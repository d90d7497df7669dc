"""A step of the engine, counted: evaluations, primitives, Python calls, KV copies, allocations. No times.

The ceilings are what the code takes today and a tenth more; raising one is a decision that a review sees. The tests
named `a_regression_...` put a fault in and show that its count would fail.
"""

from __future__ import annotations

import gc
import statistics
import sys
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

from mlx_troupe.runtime.engine.overlap import _blank
from mlx_troupe.runtime.messages.executor import JoinRow, StepPlan
from mlx_troupe.runtime.sampling_params import SamplingParams
from tests.engine.bench import settled_memory

from .counting import Evaluations, python_calls

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_troupe.runtime.engine.engine import MlxEngine

GREEDY = SamplingParams(temperature=0.0)
MODES = ("off", "build", "launch")
DEPTH = 1024
STEPS = 10

MOST_PRIMITIVES = 345
MOST_CALLS = {"greedy": 206, "mixed": 256}
MOST_CALLS_A_ROW = 0.5
"""Beyond those of the step: host work does not grow with rows."""
MOST_DEVICE_BYTES_A_ROW = 144 << 10
"""Allocated by a step at its highest: scores (16 KiB for four heads over `DEPTH`) and two arrays of their exponentials,
of layers that are built before the first has run; logits (2 KiB), others."""
MOST_BLOCKS = 40
"""Growth of live Python objects over `STEPS` steps, whatever the number of rows."""


def sampling_of(mix: str, row: int) -> SamplingParams:
    return GREEDY if mix == "greedy" else SamplingParams(temperature=0.5 + row / 100, top_p=0.9, seed=row)


class Steps:
    """Rows of `DEPTH` tokens in an engine, stepped with nobody listening."""

    def __init__(self, engine: MlxEngine, rows: int, mix: str = "greedy") -> None:
        self.engine = engine
        self.rows = tuple(range(rows))
        self.number = 0
        for row in self.rows:
            engine._staged[row] = _blank(engine._model, DEPTH)
        joins = tuple(JoinRow(row, row, DEPTH, 30 + row, sampling_of(mix, row), (), 0) for row in self.rows)
        self.take(joins=joins, discards=self.rows)
        for _ in range(4):
            self.take()

    def take(self, **parts: Any) -> None:
        """One step."""
        self.number += 1
        self.engine.run(StepPlan(self.number, self.rows, **parts), lambda message: None)

    def calls(self) -> float:
        """Python calls of a step, the median of several."""
        counts = []
        for _ in range(STEPS):
            with python_calls() as found:
                self.take()
            counts.append(sum(found.values()))
        return statistics.median(counts)

    def copied_bytes(self) -> int:
        """How far memory rises above its level while steps run."""
        self.engine.run(StepPlan(self.number + 1), lambda message: None)
        self.number += 1
        level = settled_memory()
        mx.reset_peak_memory()
        for _ in range(STEPS):
            self.take()
        mx.synchronize()
        return mx.get_peak_memory() - level

    def layer_bytes(self) -> int:
        """Keys and values of one layer."""
        groups = self.engine._batch._groups.values()
        return min(sum(array.nbytes for array in group.stores[0].arrays()) for group in groups)


@pytest.fixture
def steps(new_engine: Callable[..., MlxEngine]) -> Callable[..., Steps]:
    def make(rows: int, overlap: str = "build", mix: str = "greedy") -> Steps:
        return Steps(new_engine("llama", overlap, classes=(4096,), page=256), rows, mix)

    return make


def evaluations(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Evaluations, and primitives handed over, of each of `STEPS` steps."""
    found = []
    with monkeypatch.context() as patch:
        counter = Evaluations()
        counter.watch(patch)
        for _ in range(STEPS):
            before = counter.count, counter.primitives
            steps.take()
            found.append((counter.count - before[0], counter.primitives - before[1]))
    return found


def test_one_evaluation_a_step(steps, monkeypatch):
    assert {count for count, _ in evaluations(steps(4, "off"), monkeypatch)} == {1}


def test_primitives_of_a_step_do_not_grow_with_rows(steps, monkeypatch):
    found = {rows: {built for _, built in evaluations(steps(rows, "off"), monkeypatch)} for rows in (2, 16)}
    assert found[2] == found[16]
    assert 100 < max(found[16]) <= MOST_PRIMITIVES


@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize("mix", MOST_CALLS)
def test_python_calls_of_a_step(overlap, mix, steps):
    few, many = steps(2, overlap, mix).calls(), steps(16, overlap, mix).calls()
    assert few <= MOST_CALLS[mix]
    assert many - few <= MOST_CALLS_A_ROW * 14


@pytest.mark.parametrize("overlap", ["off", "build"])
def test_no_step_copies_kv_nor_allocates_much(overlap, steps):
    four = steps(4, overlap)
    extra = four.copied_bytes()
    assert extra < four.layer_bytes() // 2
    assert extra <= 4 * MOST_DEVICE_BYTES_A_ROW


@pytest.mark.parametrize("overlap", MODES)
def test_steps_leave_no_objects_behind(overlap, steps):
    eight = steps(8, overlap)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(STEPS):
        eight.take()
    gc.collect()
    assert sys.getallocatedblocks() - before <= MOST_BLOCKS


# --- what would fail --------------------------------------------------------------------------------------------------


def test_a_regression_in_evaluations_is_seen(steps, monkeypatch):
    """The logits are evaluated apart from the tokens."""
    two = steps(2, "off")
    forward = two.engine._batch.forward

    def eager(tokens: mx.array) -> mx.array:
        logits = forward(tokens)
        mx.eval(logits)
        return logits

    monkeypatch.setattr(two.engine._batch, "forward", eager)
    assert {count for count, _ in evaluations(two, monkeypatch)} == {2}


def test_a_regression_in_primitives_is_seen(steps, monkeypatch):
    """One operation a row and step."""
    sixteen = steps(16, "off")
    forward = sixteen.engine._batch.forward

    def row_by_row(tokens: mx.array) -> mx.array:
        logits = forward(tokens)
        return mx.concatenate([logits[place : place + 1] * 1.0 for place in range(logits.shape[0])])

    monkeypatch.setattr(sixteen.engine._batch, "forward", row_by_row)
    assert min(built for _, built in evaluations(sixteen, monkeypatch)) > MOST_PRIMITIVES


def test_a_regression_in_python_calls_is_seen(steps, monkeypatch):
    """One call a row and step."""
    few, many = steps(2), steps(16)
    usual = few.calls()
    forward = many.engine._batch.forward

    def one_by_one(tokens: mx.array) -> mx.array:
        for row in many.rows:
            sampling_of("mixed", row)
        return forward(tokens)

    monkeypatch.setattr(many.engine._batch, "forward", one_by_one)
    assert many.calls() - usual > MOST_CALLS_A_ROW * 14


def test_a_regression_in_kv_copies_is_seen(steps):
    """A live view of the keys makes MLX copy them at the next write."""
    four = steps(4, "build")
    store = next(iter(four.engine._batch._groups.values())).stores[0]
    alias = store.keys[:, :, :1]
    mx.eval(alias)
    assert four.copied_bytes() > 4 * MOST_DEVICE_BYTES_A_ROW
    assert alias.shape[2] == 1


def test_a_regression_in_objects_is_seen(steps, monkeypatch):
    """Something is kept for every row and step."""
    eight, kept = steps(8), []
    forward = eight.engine._batch.forward

    def keeping(tokens: mx.array) -> mx.array:
        kept.extend([row] for row in eight.rows)
        return forward(tokens)

    monkeypatch.setattr(eight.engine._batch, "forward", keeping)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(STEPS):
        eight.take()
    gc.collect()
    assert sys.getallocatedblocks() - before > MOST_BLOCKS
