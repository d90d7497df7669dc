"""Thousands of steps of joins and leaves leave nothing behind: device memory and Python objects stay flat."""

from __future__ import annotations

import gc
import random

import mlx.core as mx
import pytest

from mlx_troupe.runtime.sampling_params import SamplingParams

from .bench import Bench, settled_memory
from .conftest import PAGE, prompt_of

LENGTHS = (1, 5, 17, 23, 40, 70)


class Traffic:
    """Rows come and go at random; some are penalised, some leave pages that the next ones start from."""

    def __init__(self, engine: object, *, pages: bool, seed: int = 0) -> None:
        self.bench = Bench(engine)  # type: ignore[arg-type]
        self.random, self.pages = random.Random(seed), pages
        self.row = 0
        self.left: dict[int, int] = {}

    def step(self) -> None:
        """One plan: rows that are done leave, perhaps one joins."""
        bench = self.bench
        done = [row for row in bench.rows if self.left[row] <= 0]
        leaves = tuple(bench.leaving(row, (0,) if self.pages and bench.prompts[row][PAGE:] else ()) for row in done)
        joins = ()
        if self.random.random() < 0.12:
            joins = (self._join(),)
        bench.plan(leaves=leaves, joins=joins, discards=tuple(join.row for join in joins))
        for leave in leaves:
            if leave.stash_pages:
                bench.engine.adopt(leave.row, ((0, leave.row),))
                bench.engine.drop((leave.row - 5,))
            del bench.tokens[leave.row], bench.prompts[leave.row], self.left[leave.row]
        for row in bench.rows:
            self.left[row] -= 1

    def _join(self) -> object:
        self.row += 1
        prompt = prompt_of(self.random.choice(LENGTHS), seed=self.row)
        self.bench.stage(self.row, prompt)
        self.left[self.row] = self.random.randrange(1, 60)
        penalty = 0.5 * (self.row % 2)
        sampling = SamplingParams(temperature=0.7, seed=self.row, presence_penalty=penalty, top_logprobs=1)
        return self.bench.joining(self.row, prompt, sampling=sampling, history=tuple(prompt))

    def settle(self) -> None:
        """All rows leave and all pages go."""
        self.bench.plan(leaves=tuple(self.bench.leaving(row) for row in list(self.bench.rows)))
        self.bench.engine.drop(tuple(range(self.row + 1)))
        self.bench.flush()
        for held in (self.left, self.bench.said, self.bench.tokens, self.bench.prompts, self.bench.log):
            held.clear()
        self.bench._plans.clear()


def levels(traffic: Traffic, steps: int) -> tuple[int, int, int]:
    """Device bytes and Python objects after so many steps, with no row left; and the peak."""
    mx.reset_peak_memory()
    for _ in range(steps):
        traffic.step()
        traffic.bench.said.clear()
        traffic.bench.log.clear()
    traffic.settle()
    gc.collect()
    return settled_memory(), len(gc.get_objects()), mx.get_peak_memory()


def check_flat(traffic: Traffic, steps: int) -> None:
    levels(traffic, 300)
    first = levels(traffic, steps)
    second = levels(traffic, steps)
    assert abs(second[0] - first[0]) < 4096
    assert abs(second[1] - first[1]) < 100
    assert second[2] < 1.3 * first[2]


def test_a_few_hundred_steps_stay_flat(new_engine) -> None:
    check_flat(Traffic(new_engine("llama"), pages=True), 300)


@pytest.mark.heavy
@pytest.mark.parametrize("overlap", ["launch", "build"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next", "llama4", "falcon_h1"])
def test_3000_steps_stay_flat(architecture, overlap, new_engine) -> None:
    check_flat(Traffic(new_engine(architecture, overlap), pages=architecture == "llama"), 3000)
