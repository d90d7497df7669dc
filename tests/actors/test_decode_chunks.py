"""Decode's core against the fake engine: offered chunks and the debt to running rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mlx_troupe.runtime.messages.decode import ChunksResult, Offer
from mlx_troupe.runtime.messages.executor import Chunk
from mlx_troupe.runtime.messages.prefill import ChunksDone
from tests.actors.bench import Bench
from tests.actors.parts import make_row
from tests.fake_engine import Costs

if TYPE_CHECKING:
    from mlx_troupe.runtime.request import Request


def decoding_bench(step_s: float = 0.1) -> tuple[Bench, Request]:
    """A bench with one long row decoding, each step taking `step_s`."""
    bench = Bench(costs=Costs(step_s=step_s))
    row = make_row([5], 500)
    bench.prefill(row)
    bench.run_until(lambda: len(row.output) == 3)
    return bench, row


def chunk_of(row: int, tokens: int = 8, start: int = 0) -> Chunk:
    return Chunk(row, tuple(range(1, tokens + 1)), start)


def steps_until_chunk(bench: Bench) -> int:
    """Decode steps planned before the one that carries chunks."""
    before = len(bench.engine.plans)
    bench.run_until(lambda: any(plan.chunks for plan in bench.engine.plans[before:]))
    return next(place for place, plan in enumerate(bench.engine.plans[before:]) if plan.chunks)


@pytest.mark.parametrize(("owed_s", "steps"), [(0.0, 0), (0.2, 0), (0.3, 1), (0.55, 4), (1.0, 8)])
def test_a_chunk_waits_until_running_rows_had_their_time(owed_s: float, steps: int) -> None:
    bench, _row = decoding_bench()
    bench.core._desk._decoded_s = 0.0
    bench.core.offer(Offer((chunk_of(900),), owed_s))
    # Two steps count before they are measured: the one in flight and the chunk's own plan's.
    assert steps_until_chunk(bench) == pytest.approx(steps, abs=1)


def test_a_chunk_does_not_wait_when_nothing_decodes() -> None:
    bench = Bench()
    bench.core.offer(Offer((chunk_of(900),), 100.0))
    plan = bench.launch()
    assert plan is not None
    assert len(plan.chunks) == 1


def test_nothing_is_sent_behind_a_chunk_until_prefill_has_answered() -> None:
    bench, row = decoding_bench()
    bench.core.offer(Offer((chunk_of(900),), 0.0))
    bench.run_until(lambda: bool(bench.core.to_prefill))
    report = bench.core.to_prefill.pop()
    assert isinstance(report, ChunksDone)
    assert [(done.row, done.tokens, done.start) for done in report.chunks] == [(900, 8, 0)]
    assert report.decoding_rows == 1
    assert bench.core.plan() is None
    bench.core.offer(Offer((), 0.0))
    assert bench.core.plan() is not None
    assert not row.finished


def test_a_cancel_during_a_chunk_takes_effect_at_once() -> None:
    bench, row = decoding_bench()
    bench.core.offer(Offer((chunk_of(900),), 0.0))
    while not any(plan.chunks for plan in bench.engine.plans):
        if bench.launch() is None:
            bench.deliver()
    while not isinstance(bench.emitted[0], ChunksResult):
        bench.deliver()
    bench.core.cancel([row.row])
    assert row.finish_reason == "cancelled"


def test_a_second_offer_replaces_one_that_is_not_planned() -> None:
    bench, _row = decoding_bench()
    bench.core._desk._decoded_s = 0.0
    bench.core.offer(Offer((chunk_of(900, 100),), 50.0))
    bench.core.offer(Offer((chunk_of(901),), 0.0))
    report = bench.core.to_prefill.pop()
    assert isinstance(report, ChunksDone)
    assert [(done.row, done.dropped, done.tokens) for done in report.chunks] == [(900, True, 0)]
    bench.core.offer(Offer((), 0.0))
    bench.run_until(lambda: bool(bench.core.to_prefill))
    ran = [chunk.row for plan in bench.engine.plans for chunk in plan.chunks]
    assert ran == [901]


def test_withdrawn_rows_are_reported_and_their_kv_is_freed() -> None:
    bench, _row = decoding_bench()
    bench.core.offer(Offer((chunk_of(900),), 0.0))
    bench.run_until(lambda: bool(bench.core.to_prefill))
    bench.core.to_prefill.clear()
    bench.core._desk._decoded_s = 0.0
    bench.core.offer(Offer((Chunk(900, (9,), 8), chunk_of(901)), 50.0))
    bench.core.withdraw([900])
    report = bench.core.to_prefill.pop()
    assert isinstance(report, ChunksDone)
    assert [(done.row, done.dropped) for done in report.chunks] == [(900, True)]
    bench.core.offer(Offer((), 0.0))
    bench.run_until(lambda: 900 not in bench.engine.staged)
    bench.core.withdraw([901])
    bench.core.offer(Offer((), 0.0))
    assert not any(chunk.row == 901 for plan in bench.engine.plans for chunk in plan.chunks)


def test_withdrawn_while_its_chunk_runs() -> None:
    bench = Bench()
    bench.core.offer(Offer((chunk_of(900),), 0.0))
    bench.launch()
    bench.core.withdraw([900])
    bench.deliver()
    bench.core.offer(Offer((), 0.0))
    bench.finish()


def test_chunk_errors_and_missed_restores_are_reported() -> None:
    bench = Bench()
    bench.engine.faults.chunk_rows.add(900)
    bench.core.offer(Offer((chunk_of(900), Chunk(901, (1,), 4, (77,), 4)), 0.0))
    bench.launch()
    bench.deliver()
    report = bench.core.to_prefill.pop()
    assert isinstance(report, ChunksDone)
    failed, missed = report.chunks
    assert (failed.tokens, failed.error) == (0, "RuntimeError: injected")
    assert (missed.tokens, missed.restore_missed, missed.error) == (0, True, None)
