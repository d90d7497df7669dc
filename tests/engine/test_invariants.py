"""The invariants of DESIGN section 3 that live in the engine: 1, 3 and 5 here; 6, 7 and 8 in files of their own."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from mlx_troupe.runtime.messages.decode import StepResult
from mlx_troupe.runtime.messages.executor import AdoptPages, Chunk
from mlx_troupe.runtime.request import PLACEHOLDER

from .bench import Bench
from .conftest import PAGE, prompt_of

PROMPTS = [prompt_of(length) for length in (23, 5, 40, 1)]
BATCHED_AND_NOT = ["llama", "llama4"]


@pytest.mark.parametrize("overlap", ["launch", "build"])
@pytest.mark.parametrize("architecture", BATCHED_AND_NOT)
def test_invariant_1_lengths_advance_at_launch_and_tokens_are_filled_at_commit(
    architecture, overlap, new_engine, monkeypatch
) -> None:
    bench = Bench(new_engine(architecture, overlap))
    bench.join(0, PROMPTS[0])
    log = bench.watch(monkeypatch)
    for done in range(1, 6):
        assert bench.engine._batch.length(0) == len(PROMPTS[0]) - 1 + done
        assert len(bench.tokens[0]) == done - 1
        step = bench.plan()
        assert log[-1] == f"commit {step - 1}"
        assert log.index(f"read {step - 1}") > log.index("forward"), "the host read tokens before the next launch"
        log.clear()
    bench.flush()
    assert len(bench.tokens[0]) == 6
    assert bench.engine._batch.length(0) == len(PROMPTS[0]) - 1 + 6


def test_invariant_1_off_fills_tokens_in_the_same_plan(new_engine) -> None:
    bench = Bench(new_engine("llama", "off"))
    bench.join(0, PROMPTS[0])
    for done in range(1, 4):
        assert len(bench.tokens[0]) == done
        bench.plan()


@pytest.mark.parametrize("overlap", ["launch", "build", "off"])
def test_invariant_1_rows_that_failed_get_the_placeholder_and_it_is_no_token(overlap, new_engine, solo) -> None:
    """Row 9 has no staged KV: it fails to join, and this plan names it still."""
    bench = Bench(new_engine("llama", overlap))
    bench.join(0, PROMPTS[0])
    bench.plan(joins=(bench.joining(9, PROMPTS[1]),))
    assert list(bench.failed) == [9]
    bench.rows.append(9)
    bench.plan()
    bench.flush()
    assert bench.tokens[9] == [PLACEHOLDER] * 2
    assert PLACEHOLDER < 0
    assert bench.tokens[0] == solo("llama", PROMPTS[0], 3)
    assert all(token >= 0 for token in bench.tokens[0])


@pytest.mark.parametrize("architecture", BATCHED_AND_NOT)
def test_invariant_3_a_row_that_leaves_keeps_the_token_in_flight_though_another_takes_its_place(
    architecture, new_engine, solo
) -> None:
    bench = Bench(new_engine(architecture, classes=()))
    for row in range(2):
        bench.join(row, PROMPTS[row])
    bench.stage(2, PROMPTS[2])
    bench.plan()
    places = bench.engine._batch.order
    bench.plan(leaves=(bench.leaving(0),), joins=(bench.joining(2, PROMPTS[2]),), discards=(2,))
    if architecture == "llama":
        assert bench.engine._batch.order.index(2) == places.index(0), "the row did not take the free place"
    bench.steps(3)
    bench.flush()
    for row in range(3):
        assert bench.tokens[row] == solo(architecture, PROMPTS[row], len(bench.tokens[row])), f"row {row}"
    assert [len(bench.tokens[row]) for row in range(3)] == [3, 6, 4]


def test_invariant_3_leaving_twice_and_leaving_unknown_mean_nothing(new_engine, solo) -> None:
    bench = Bench(new_engine())
    for row in range(2):
        bench.join(row, PROMPTS[row])
    again = bench.leaving(0, (0, 1))
    bench.plan(leaves=(again,))
    bench.plan(leaves=(again, msgspec.structs.replace(again, row=77)))
    bench.steps(2)
    bench.flush()
    assert bench.tokens[1] == solo("llama", PROMPTS[1], len(bench.tokens[1]))
    assert set(bench.engine._stash) == {0}
    bench.engine._batch.check_integrity()


def test_invariant_3_pages_are_freed_once_and_their_readers_keep_them(new_engine, solo) -> None:
    """A page may be dropped as soon as the plan that restores it has run; dropping it again means nothing."""
    bench = Bench(new_engine())
    prompt = PROMPTS[2]
    pages = tuple(range((len(prompt) - 1) // PAGE))
    bench.stage(0, prompt, stash_pages=pages)
    ids = tuple(index + 100 for index in pages)
    order = AdoptPages(0, tuple(zip(pages, ids, strict=True)))
    assert bench.engine.adopt(order.row, order.pages) == ()
    whole = len(pages) * PAGE
    assert bench.chunk(Chunk(1, tuple(prompt[whole:-1]), whole, ids, whole)).error is None
    for _ in range(2):
        bench.engine.drop(ids)
    bench.plan(joins=(bench.joining(1, prompt),), discards=(0, 1))
    bench.steps(6)
    bench.flush()
    assert bench.tokens[1] == solo("llama", prompt, 7)
    assert not bench.engine._pages
    assert not bench.engine._staged


@pytest.mark.parametrize("overlap", ["launch", "build"])
@pytest.mark.parametrize("architecture", BATCHED_AND_NOT)
def test_invariant_5_a_row_joins_without_a_barrier(architecture, overlap, new_engine, solo, monkeypatch) -> None:
    """The plan that lets it in is launched before the step under way is read, and its first token comes with it."""
    bench = Bench(new_engine(architecture, overlap))
    bench.join(0, PROMPTS[0])
    bench.stage(1, PROMPTS[1])
    bench.steps(2)
    log = bench.watch(monkeypatch)
    step = bench.plan(joins=(bench.joining(1, PROMPTS[1]),), discards=(1,))
    first = {"launch": "submit", "build": "sample"}[overlap]
    assert log.index(first) < log.index(f"read {step - 1}")
    assert log[-1] == f"commit {step - 1}"
    bench.plan()
    results = [message for message in bench.said if isinstance(message, StepResult)]
    assert results[-1].step == step
    assert len(results[-1].tokens) == 2
    bench.flush()
    for row in range(2):
        assert bench.tokens[row] == solo(architecture, PROMPTS[row], len(bench.tokens[row]))


def test_invariant_5_a_one_token_prompt_joins_with_nothing_staged(new_engine, solo) -> None:
    bench = Bench(new_engine())
    bench.join(0, PROMPTS[0])
    bench.plan(joins=(bench.joining(3, PROMPTS[3]),))
    bench.steps(20)
    bench.flush()
    for row in (0, 3):
        assert bench.tokens[row] == solo("llama", PROMPTS[row], len(bench.tokens[row]))


def test_results_are_plain_numbers(new_engine) -> None:
    bench = Bench(new_engine())
    bench.join(0, PROMPTS[0])
    bench.flush()
    assert all(type(token) is int for token in bench.tokens[0])
    assert not isinstance(bench.tokens[0][0], np.integer)
