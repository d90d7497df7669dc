"""Faults inside a plan end the rows they belong to; the engine goes on, and nothing stays behind."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from mlx_troupe.runtime.engine.flight import Flight
from mlx_troupe.runtime.messages.decode import RowsFailed, StepResult
from mlx_troupe.runtime.messages.executor import Chunk, JoinRow, LeaveRow
from mlx_troupe.runtime.request import PLACEHOLDER
from mlx_troupe.runtime.sampling_params import SamplingParams

from .bench import Bench, settled_memory
from .conftest import prompt_of

OVERLAPS = ["launch", "build", "off"]
ARCHITECTURES = ["llama", "qwen3_next", "llama4"]


class Flaky:
    """mlx-lm's model, failing in layer `layer` of its next forward once it is armed."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layer: int | None = None
        for number, layer in enumerate(model.layers):
            layer.__class__ = _flaky(layer.__class__, self, number)

    def calm(self) -> None:
        for layer in self.model.layers:
            layer.__class__ = layer.__class__.__bases__[0]


def _flaky(kind: type, owner: Flaky, number: int) -> type:
    class FlakyLayer(kind):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if owner.layer == number:
                owner.layer = None
                raise RuntimeError(f"layer {number} broke")
            return super().__call__(*args, **kwargs)

    return FlakyLayer


@pytest.fixture
def flaky(tiny_model) -> Any:
    """A model to fail at will; nothing is logged, since pytest would keep the tracebacks and so the arrays."""
    logging.disable(logging.CRITICAL)
    made: list[Flaky] = []

    def arm(architecture: str) -> Flaky:
        made.append(Flaky(tiny_model(architecture)))
        return made[-1]

    yield arm
    logging.disable(logging.NOTSET)
    for each in made:
        each.calm()


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_forward_that_raises_fails_its_rows_and_the_next_rows_run(
    architecture, overlap, flaky, new_engine, solo
) -> None:
    """In each layer in turn; staged KV and pages of other rows survive, and memory returns."""
    model = flaky(architecture)
    bench = Bench(new_engine(architecture, overlap))
    bench.stage(50, prompt_of(40))
    for row in range(1, 2 * len(model.model.layers) + 1):
        solo(architecture, prompt_of(20 + row, seed=row), 8)  # what it keeps is not the engine's
    base = settled_memory()
    for layer in range(len(model.model.layers)):
        rows = [2 * layer + 1, 2 * layer + 2]
        for row in rows:
            bench.join(row, prompt_of(20 + row, seed=row), sampling=SamplingParams(temperature=0.0, top_logprobs=1))
        bench.steps(3)
        model.layer = layer
        step = bench.plan()
        failure = next(message for message in bench.said[::-1] if isinstance(message, RowsFailed))
        assert failure.step == step
        assert set(failure.rows) == set(rows)
        assert "broke" in failure.error
        for row in rows:
            said = bench.tokens[row]
            assert len(said) in (3, 4, 5)
            assert said == solo(architecture, prompt_of(20 + row, seed=row), len(said)), "a step before was lost"
        bench.flush()
        assert not any(token == PLACEHOLDER for row in rows for token in bench.tokens[row])
        assert settled_memory() - base < 4096
    bench.plan(joins=(bench.joining(50, prompt_of(40)),), discards=(50,))
    bench.steps(5)
    bench.flush()
    assert bench.tokens[50] == solo(architecture, prompt_of(40), 6)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_plans_already_sent_may_name_rows_that_failed(overlap, flaky, new_engine, solo) -> None:
    model = flaky("llama")
    bench = Bench(new_engine("llama", overlap))
    bench.join(0, prompt_of(23))
    bench.stage(1, prompt_of(5))
    model.layer = 1
    bench.plan()
    bench.rows = [0]
    bench.plan(joins=(bench.joining(1, prompt_of(5)),), discards=(1,))
    bench.plan(leaves=(LeaveRow(0, (8, 16)),))
    bench.rows.remove(0)
    bench.steps(3)
    bench.flush()
    results = [message for message in bench.said if isinstance(message, StepResult)]
    assert results[-1].tokens[0] >= 0
    assert bench.tokens[1] == solo("llama", prompt_of(5), 5)
    assert set(bench.failed) == {0}
    assert bench.adopt(0, ((0, 1), (1, 2))) == (1, 2)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_step_that_cannot_be_read_fails_its_rows_under_its_number(overlap, new_engine, solo, monkeypatch) -> None:
    """The row that left with the plan behind it too, since nobody would answer for it otherwise."""
    bench = Bench(new_engine("llama", overlap))
    for row in range(2):
        bench.join(row, prompt_of(23 + row))
    bench.steps(2)
    lost = bench.plan()
    said = len(bench.tokens[0])

    def unreadable(flight: Flight) -> list[int]:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(Flight, "read", unreadable)
        last = bench.plan(leaves=(bench.leaving(0),))
    failures = [message for message in bench.said if isinstance(message, RowsFailed)]
    if overlap == "off":
        assert {failure.step for failure in failures} == {last}
        assert set(bench.failed) == {1}
    else:
        assert failures[0] == RowsFailed(lost, (0, 1), "RuntimeError: device lost", "step")
        assert set(bench.failed) == {0, 1}
    assert len(bench.tokens[0]) == said
    bench.join(2, prompt_of(40))
    bench.steps(3)
    bench.flush()
    assert bench.tokens[2] == solo("llama", prompt_of(40), 4)


@pytest.mark.parametrize("before_chunk", [True, False])
def test_a_lost_step_without_rows_behind_it_does_not_kill_the_engine(before_chunk, new_engine, monkeypatch) -> None:
    """A flush, and the barrier before a chunk: the chunk runs all the same."""
    bench = Bench(new_engine())
    bench.join(0, prompt_of(23))
    bench.rows = []
    with monkeypatch.context() as patch:
        patch.setattr(Flight, "read", lambda flight: 1 / 0)
        chunks = (Chunk(1, tuple(prompt_of(17)), 0),) if before_chunk else ()
        bench.plan(leaves=(LeaveRow(0),), chunks=chunks)
    assert "ZeroDivisionError" in bench.failed[0]
    assert set(bench.engine._staged) == ({1} if before_chunk else set())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_chunk_that_raises_fails_that_row_only(architecture, flaky, new_engine, solo) -> None:
    model = flaky(architecture)
    bench = Bench(new_engine(architecture))
    bench.join(0, prompt_of(23))
    bench.steps(2)
    base = settled_memory()
    assert bench.chunk(Chunk(1, tuple(prompt_of(40)[:20]), 0)).error is None
    model.layer = 1
    outcome = bench.chunk(Chunk(1, tuple(prompt_of(40)[20:39]), 20))
    assert outcome.error == "RuntimeError: layer 1 broke"
    assert outcome.row == 1
    assert not bench.engine._staged
    assert settled_memory() - base < 4096
    late = bench.chunk(Chunk(1, (5, 6), 39))
    assert "KeyError" in (late.error or "")
    bench.join(2, prompt_of(40))
    bench.steps(4)
    bench.flush()
    for row in (0, 2):
        said = bench.tokens[row]
        assert said == solo(architecture, bench.prompts[row], len(said))
    assert bench.failed == {}


def test_a_chunk_that_does_not_fit_is_an_error_of_its_row(new_engine) -> None:
    bench = Bench(new_engine())
    assert bench.chunk(Chunk(1, (5, 6), 3)).error is not None
    assert not bench.engine._staged


def test_a_piece_that_cannot_be_cut_is_lost_and_the_row_goes_on(new_engine) -> None:
    bench = Bench(new_engine())
    assert bench.chunk(Chunk(1, (5, 6), 0, stash=(8, 2))).error is None
    assert bench.engine.adopt(1, ((8, 4), (2, 5))) == (4,)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_next", "llama4"])
def test_a_join_that_raises_fails_that_row_only(architecture, overlap, new_engine, solo, monkeypatch) -> None:
    """Whatever part of joining raises; the row is nowhere afterwards."""
    bench = Bench(new_engine(architecture, overlap))
    bench.join(0, prompt_of(23))
    engine = bench.engine
    for row, (target, method) in enumerate(((engine._batch, "join"), (engine._sampler, "join"), (engine, "_join")), 10):
        bench.stage(row, prompt_of(40))
        with monkeypatch.context() as patch:
            patch.setattr(target, method, lambda *args: 1 / 0)
            bench.plan(joins=(bench.joining(row, prompt_of(40)),), discards=(row,))
        assert "ZeroDivisionError" in bench.failed[row]
        assert row not in engine._batch.order
        assert row not in engine._sampler._rows
        bench.plan(leaves=(LeaveRow(row),))
    wrong_length = JoinRow(20, 0, 7, 5, SamplingParams(temperature=0.0))
    bench.rows.append(20)
    bench.tokens[20] = []
    bench.plan(joins=(wrong_length,))
    assert "no KV is staged" in bench.failed[20]
    bench.stage(21, prompt_of(40))
    bench.tokens[21] = []
    bench.rows.append(21)
    bench.plan(joins=(JoinRow(21, 21, 7, 5, SamplingParams(temperature=0.0)),), discards=(21,))
    assert "39 tokens are staged for row 21, not 7" in bench.failed[21]
    bench.steps(4)
    bench.flush()
    assert not engine._staged
    assert not engine._fresh
    assert bench.tokens[0] == solo(architecture, prompt_of(23), len(bench.tokens[0]))


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_joins_that_all_fail_leave_no_places_behind(overlap, new_engine, solo) -> None:
    """Room was made for three rows in a batch that had none."""
    bench = Bench(new_engine("llama", overlap))
    bench.plan(joins=tuple(bench.joining(row, prompt_of(40)) for row in range(3)))
    assert set(bench.failed) == {0, 1, 2}
    assert bench.engine._batch.order == []
    bench.join(5, prompt_of(23))
    bench.steps(3)
    bench.flush()
    assert bench.tokens[5] == solo("llama", prompt_of(23), 4)


def test_room_that_cannot_be_made_at_once_is_made_row_by_row(new_engine, solo, monkeypatch) -> None:
    bench = Bench(new_engine())
    monkeypatch.setattr(bench.engine._batch, "reserve", lambda lengths: 1 / 0)
    for row in range(3):
        bench.stage(row, prompt_of(5 + row))
    bench.plan(joins=tuple(bench.joining(row, prompt_of(5 + row)) for row in range(3)), discards=(0, 1, 2))
    bench.steps(4)
    bench.flush()
    assert bench.failed == {}
    for row in range(3):
        assert bench.tokens[row] == solo("llama", prompt_of(5 + row), 5)


def test_rows_that_cannot_be_rearranged_stay_where_they_are(new_engine, solo, monkeypatch) -> None:
    """A class move that fails is tried again with each plan; the rows decode meanwhile."""
    bench = Bench(new_engine())
    for row, length in enumerate((5, 17, 40)):
        bench.join(row, prompt_of(length))
    with monkeypatch.context() as patch:
        patch.setattr("mlx_troupe.runtime.engine.kv.group.RowGroup.extract", lambda *args: 1 / 0)
        bench.steps(60)
    bench.steps(5)
    bench.flush()
    assert bench.failed == {}
    for row in range(3):
        assert bench.tokens[row] == solo("llama", bench.prompts[row], len(bench.tokens[row]))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "deepseek_v3", "qwen3_next"])
def test_a_row_of_nan_poisons_neither_its_neighbours_nor_its_successor(architecture, new_engine, solo) -> None:
    """Its successor takes its place in the buffers: what is masked there must not be NaN."""
    import mlx.core as mx

    from mlx_troupe.runtime.engine.kv.staged import leaf_caches

    bench = Bench(new_engine(architecture, classes=()))
    bench.join(0, prompt_of(130))
    bench.stage(1, prompt_of(70))
    for cache in leaf_caches(bench.engine._staged[1].caches):
        if hasattr(cache, "keys"):
            cache.keys, cache.values = cache.keys * mx.nan, cache.values * mx.nan
        else:
            cache.cache = [state * mx.nan for state in cache.cache]
    bench.plan(joins=(bench.joining(1, prompt_of(70)),), discards=(1,))
    places = bench.engine._batch.order
    bench.steps(3)
    assert list(bench.failed) == [1], "the engine throws it out by itself"
    for row, length in ((2, 40), (3, 1)):
        if row > 2:
            bench.leave(row - 1)
        bench.join(row, prompt_of(length))
        assert bench.engine._batch.order.index(row) == places.index(1)
        bench.steps(8)
    bench.flush()
    for row in (0, 2, 3):
        assert bench.tokens[row] == solo(architecture, bench.prompts[row], len(bench.tokens[row])), f"row {row}"


def test_chunks_do_not_run_while_more_is_in_use_than_their_plan_allows(new_engine, solo) -> None:
    bench = Bench(new_engine("llama", "launch"))
    bench.join(0, prompt_of(23))
    prompt = prompt_of(40, seed=1)
    bench.flush()
    bench.plan(chunks=(Chunk(1, tuple(prompt[:-1]), 0),), chunks_below_bytes=1)
    result = bench.said[-1]
    assert result.outcomes[0].crowded
    assert result.active_bytes > 1
    assert not bench.engine._staged, "nothing ran"
    bench.plan(chunks=(Chunk(1, tuple(prompt[:-1]), 0),), chunks_below_bytes=result.active_bytes + (1 << 20))
    assert not bench.said[-1].outcomes[0].crowded
    bench.plan(joins=(bench.joining(1, prompt),), discards=(1,))
    bench.steps(4)
    bench.flush()
    for row in (0, 1):
        assert bench.tokens[row] == solo("llama", bench.prompts[row], len(bench.tokens[row]))
