"""Rows that draw on the host: the next step is built before their draw, and membership may change at any moment.

A temperature near zero draws the likeliest token, so such rows can be compared with mlx_lm's greedy output.
"""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_troupe.runtime.engine.kv.pages import leaf_caches
from mlx_troupe.runtime.sampling_params import SamplingParams

from .bench import Bench
from .conftest import prompt_of

COLD = SamplingParams(temperature=1e-6, seed=3)


@pytest.mark.parametrize("overlap", ["launch", "build", "off"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next", "llama4"])
def test_drawn_rows_come_and_go_among_greedy_ones(architecture, overlap, new_engine, solo) -> None:
    bench = Bench(new_engine(architecture, overlap))
    bench.join(0, prompt_of(23), sampling=COLD)
    bench.steps(2)
    bench.join(1, prompt_of(40))
    bench.steps(3)
    bench.stage(2, prompt_of(9))
    bench.steps(1)
    bench.plan(joins=(bench.joining(2, prompt_of(9), sampling=COLD),), leaves=(bench.leaving(1),), discards=(2,))
    bench.steps(3)
    bench.leave(0)
    bench.steps(2)
    bench.join(3, prompt_of(5))
    bench.leave(2)
    bench.steps(4)
    bench.flush()
    assert bench.failed == {}
    for row, said in bench.tokens.items():
        assert said == solo(architecture, bench.prompts[row], len(said)), f"row {row}"


def test_the_next_step_is_built_before_the_draw(new_engine, monkeypatch) -> None:
    bench = Bench(new_engine("llama", "launch"))
    bench.join(0, prompt_of(23), sampling=COLD)
    bench.steps(2)
    log = bench.watch(monkeypatch)
    bench.plan()
    assert log[:3] == ["forward", f"read {bench._step - 1}", "sample"]
    assert log.index("submit") < log.index(f"commit {bench._step - 1}"), "the device works while the tokens are told"


@pytest.mark.parametrize("sampling", [COLD, SamplingParams(temperature=1e-6, seed=3, repetition_penalty=1.01)])
def test_a_drawn_row_of_nan_fails_alone(sampling, new_engine, solo) -> None:
    bench = Bench(new_engine("llama", "launch"))
    bench.join(0, prompt_of(40), sampling=COLD)
    bench.stage(1, prompt_of(17))
    for cache in leaf_caches(bench.engine._staged[1].caches):
        cache.keys, cache.values = cache.keys * mx.nan, cache.values * mx.nan
    bench.plan(joins=(bench.joining(1, prompt_of(17), sampling=sampling),), discards=(1,))
    bench.steps(6)
    bench.flush()
    assert list(bench.failed) == [1]
    assert bench.tokens[0] == solo("llama", bench.prompts[0], len(bench.tokens[0]))


def test_a_draw_that_raises_fails_its_step_and_no_other(new_engine, solo, monkeypatch) -> None:
    bench = Bench(new_engine("llama", "launch"))
    bench.join(0, prompt_of(40), sampling=COLD)
    bench.steps(2)

    def failing(*_, **__):
        raise RuntimeError("no draw")

    with monkeypatch.context() as broken:
        broken.setattr(bench.engine._sampler, "sample", failing)
        bench.plan()
    assert list(bench.failed) == [0]
    bench.join(1, prompt_of(17), sampling=COLD)
    bench.steps(4)
    bench.flush()
    assert len(bench.tokens[1]) == 5
    assert bench.tokens[1] == solo("llama", bench.prompts[1], 5)
