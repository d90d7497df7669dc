"""Drives an engine by plans, as decode would, without actors: every method of the protocol in a few lines."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlx_troupe.runtime.messages.decode import ChunksResult, RowsFailed, StepResult
from mlx_troupe.runtime.messages.executor import Chunk, JoinRow, LeaveRow, StepPlan
from mlx_troupe.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_troupe.runtime.engine_protocol import Engine

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Job:
    """One row to run."""

    row: int
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    options: dict[str, Any] = field(default_factory=dict)
    output: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    launched: int = 0
    staged: int = 0
    failed: str | None = None
    joined: bool = False
    left: bool = False

    @property
    def ready(self) -> bool:
        return self.staged == len(self.prompt) - 1

    @property
    def done(self) -> bool:
        return self.failed is not None or len(self.output) >= self.max_tokens


class Driver:
    """Keeps two plans in flight (one with overlap off), joins and leaves rows as they come and go."""

    def __init__(self, engine: Engine, jobs: Sequence[Job], *, chunk_sizes: Sequence[int] = (7, 16, 64), seed: int = 0):
        self.engine = engine
        self.jobs = {job.row: job for job in jobs}
        self.sizes = chunk_sizes
        self.random = random.Random(seed)
        self.step = 0
        self.events: list[Any] = []
        self.rows_of: dict[int, tuple[int, ...]] = {}
        self.chunk_tokens: dict[int, int] = {}

    def run(self, *, join_chance: float = 0.5) -> dict[int, list[int]]:
        """Until every job is done; returns outputs by row."""
        waiting = list(self.jobs)
        active: list[int] = []
        while waiting or active:
            if waiting and (self.random.random() < join_chance or not active):
                active.append(waiting.pop(0))
            active = [row for row in active if not (self.jobs[row].done and self._out(self.jobs[row]))]
            self.plan([self.jobs[row] for row in active])
        self.flush()
        return {row: job.output[: job.max_tokens] for row, job in self.jobs.items()}

    def _out(self, job: Job) -> bool:
        return job.left or not job.joined

    def plan(self, jobs: list[Job]) -> None:
        """Build and run one plan."""
        joins, leaves, chunks, discards = [], [], [], []
        for job in jobs:
            if job.joined and not job.left and (job.launched >= job.max_tokens or job.failed):
                leaves.append(LeaveRow(job.row))
                job.left = True
            elif not job.joined and not job.failed and job.ready:
                joins.append(self._join(job))
                discards.append(job.row)
                job.joined = True
            elif not job.joined and not job.failed and not chunks:
                chunks.append(self._chunk(job))
        rows = tuple(job.row for job in jobs if job.joined and not job.left)
        for row in rows:
            self.jobs[row].launched += 1
        self.send(StepPlan(self.step, rows, tuple(joins), tuple(leaves), tuple(chunks), tuple(discards)))

    def send(self, plan: StepPlan) -> None:
        self.step = plan.step + 1
        self.rows_of[plan.step] = plan.rows
        self.engine.run(plan, self.hear)

    def flush(self) -> None:
        self.send(StepPlan(self.step))

    def _join(self, job: Job) -> JoinRow:
        return JoinRow(
            job.row, job.row, job.staged, job.prompt[-1], job.sampling, history=tuple(job.prompt), **job.options
        )

    def _chunk(self, job: Job) -> Chunk:
        tokens = tuple(job.prompt[job.staged : len(job.prompt) - 1][: self.random.choice(list(self.sizes))])
        self.chunk_tokens[job.row] = len(tokens)
        return Chunk(job.row, tokens, job.staged)

    def hear(self, message: object) -> None:
        self.events.append(message)
        match message:
            case StepResult():
                for row, token in zip(self.rows_of[message.step], message.tokens, strict=True):
                    job = self.jobs[row]
                    if token >= 0 and len(job.output) < job.max_tokens:
                        job.output.append(token)
                        if row in message.logprobs:
                            job.logprobs.append(message.logprobs[row])
            case ChunksResult():
                for outcome in message.outcomes:
                    job = self.jobs[outcome.row]
                    if outcome.error is not None:
                        job.failed = outcome.error
                    else:
                        job.staged += self.chunk_tokens[job.row]
            case RowsFailed():
                for row in message.rows:
                    self.jobs[row].failed = message.error
