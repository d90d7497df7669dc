"""The engine with a tracer: the same steps, each part of them recorded.

Besides spans of the MLX thread there is a track for the device: a step's span there begins when it was submitted, or
when the step before was done, and ends when its tokens were read. A gap between two of them is time in which the
device had no work, at least in the ways that submit after reading ("build", "off"). A step whose tokens were there
already (`waited_us` near 0) was done earlier than its span says: the host was the slower one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..tracing import DEVICE_TRACK
from .engine import MlxEngine

if TYPE_CHECKING:
    from ..messages.decode import ChunkOutcome
    from ..messages.executor import Chunk, StepPlan
    from ..messages.memory_enforcer import MemorySample
    from ..page_blob import PageBlob
    from ..tracing import Tracer
    from .engine import Emit


class TracedEngine(MlxEngine):
    """See the module. Every method runs on the MLX thread, as in its base."""

    tracer: Tracer
    _submitted_ns: dict[int, int]
    _commit_ns = 0
    _done_ns = 0

    def trace(self, tracer: Tracer) -> None:
        """Record from now on."""
        self.tracer = tracer
        self._submitted_ns = {}

    def run(self, plan: StepPlan, emit: Emit) -> None:
        """See `Engine.run`."""
        with self.tracer.span(
            f"plan {plan.step}",
            rows=len(plan.rows),
            joins=len(plan.joins),
            leaves=len(plan.leaves),
            chunk_tokens=sum(len(chunk.tokens) for chunk in plan.chunks),
        ):
            super().run(plan, emit)

    def _change_rows(self, plan: StepPlan, emit: Emit) -> None:
        if plan.joins or plan.leaves or plan.discards:
            with self.tracer.span("join and leave"):
                super()._change_rows(plan, emit)
        else:
            super()._change_rows(plan, emit)

    def _launch(self, plan: StepPlan, emit: Emit) -> None:
        began_ns = self.tracer.now()
        super()._launch(plan, emit)
        if self._flight is not None and self._flight.step == plan.step:
            self._submitted_ns[plan.step] = self._commit_ns  # a launch submits, then commits the step before
        self.tracer.add("launch", began_ns, step=plan.step, overlap=self.facts.overlap)

    def _read(self, emit: Emit) -> list[int]:
        flight = self._flight
        began_ns = self.tracer.now()
        tokens = super()._read(emit)
        if flight is not None:
            ended_ns = self.tracer.now()
            self.tracer.add("read", began_ns, ended_ns=ended_ns, step=flight.step)
            self._device_span(flight.step, began_ns, ended_ns)
        return tokens

    def _device_span(self, step: int, wait_ns: int, done_ns: int) -> None:
        submitted_ns = self._submitted_ns.pop(step, None)
        if submitted_ns is None:
            return
        waited_us = (done_ns - wait_ns) / 1e3
        self.tracer.add(
            f"step {step}",
            max(submitted_ns, self._done_ns),
            track=DEVICE_TRACK,
            ended_ns=done_ns,
            step=step,
            waited_us=waited_us,
        )
        self._done_ns = done_ns

    def _commit(self, emit: Emit) -> None:
        self._commit_ns = self.tracer.now()
        with self.tracer.span("commit"):
            super()._commit(emit)

    def _run_chunks(self, chunks: tuple[Chunk, ...]) -> tuple[ChunkOutcome, ...]:
        tokens = sum(len(chunk.tokens) for chunk in chunks)
        with self.tracer.span("prefill chunks", rows=[chunk.row for chunk in chunks], tokens=tokens):
            return super()._run_chunks(chunks)

    def adopt(self, row: int, pages: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        """See `Engine.adopt`."""
        with self.tracer.span("adopt pages", row=row, pages=len(pages)):
            return super().adopt(row, pages)

    def drop(self, pages: tuple[int, ...]) -> None:
        """See `Engine.drop`."""
        with self.tracer.span("drop pages", pages=len(pages)):
            super().drop(pages)

    def read_page(self, page: int) -> PageBlob | None:
        """See `Engine.read_page`."""
        with self.tracer.span("read page", page=page):
            return super().read_page(page)

    def load_page(self, page: int, blob: PageBlob) -> None:
        """See `Engine.load_page`."""
        with self.tracer.span("load page", page=page):
            super().load_page(page, blob)

    def sample_memory(self, *, clear_pool: bool = False) -> MemorySample:
        """See `Engine.sample_memory`."""
        with self.tracer.span("sample memory", clear_pool=clear_pool):
            return super().sample_memory(clear_pool=clear_pool)


def make_engine(tracer: Tracer | None, *args: Any, **settings: Any) -> MlxEngine:
    """An engine, traced if there is a tracer."""
    if tracer is None:
        return MlxEngine(*args, **settings)
    engine = TracedEngine(*args, **settings)
    engine.trace(tracer)
    return engine
