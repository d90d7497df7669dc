"""Invariant 7: launching ahead, building ahead and no overlap give the same tokens, however they are sampled.

Greedy equality with mlx_lm alone is in test_equality.
"""

from __future__ import annotations

from typing import Any

import pytest

from mlx_troupe.runtime.sampling_params import SamplingParams

from .conftest import random_prompts
from .driver import Driver, Job

SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_p=0.8, seed=2),
    SamplingParams(temperature=1.3, top_k=40, min_p=0.02, seed=3),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, repetition_window=12),
    SamplingParams(temperature=0.9, seed=4, presence_penalty=0.6, frequency_penalty=0.4, top_logprobs=3),
    SamplingParams(temperature=0.0, top_logprobs=5),
    SamplingParams(temperature=1.0, seed=5, xtc_probability=0.5, logit_bias=((40, 3.0), (41, -3.0)), top_logprobs=0),
]


def run(new_engine: Any, architecture: str, overlap: str, seed: int) -> list[Job]:
    prompts = random_prompts(len(SAMPLINGS), seed=21)
    jobs = [
        Job(row, prompt, 10 + 2 * row, SAMPLINGS[row], {"suppress": (300, 301), "suppress_until": 6})
        for row, prompt in enumerate(prompts)
    ]
    Driver(new_engine(architecture, overlap), jobs, seed=seed).run()
    assert all(job.failed is None for job in jobs)
    return jobs


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next"])
def test_invariant_7_overlap_changes_no_token(architecture, new_engine) -> None:
    """Other join times for each mode: a row's tokens do not depend on its neighbours either."""
    runs = [run(new_engine, architecture, overlap, seed) for seed, overlap in enumerate(("off", "launch", "build"))]
    for off, launch, build in zip(*runs, strict=True):
        assert off.output == launch.output == build.output, f"row {off.row}"
        assert len(off.output) == off.max_tokens
    for jobs in runs:
        for job in jobs:
            check_logprobs(job, runs[0][job.row])


def check_logprobs(job: Job, reference: Job) -> None:
    wanted = job.sampling.top_logprobs
    assert len(job.logprobs) == (0 if wanted is None else len(job.output))
    for mine, theirs, token in zip(job.logprobs, reference.logprobs, job.output, strict=wanted is not None):
        assert mine.chosen.token == token
        assert mine.chosen.logprob == pytest.approx(theirs.chosen.logprob, abs=1e-3)
        assert [top.token for top in mine.top] == [top.token for top in theirs.top]
        assert len(mine.top) == wanted
        assert type(mine.chosen.token) is int
        assert type(mine.chosen.logprob) is float
        assert all(type(top.token) is int and type(top.logprob) is float for top in mine.top)
