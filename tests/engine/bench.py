"""An engine driven plan by plan, everything it says kept in order; and a log of what happens inside one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_troupe.runtime.engine.flight import Flight
from mlx_troupe.runtime.messages.decode import ChunkOutcome, ChunksResult, RowsFailed, StepResult
from mlx_troupe.runtime.messages.executor import Chunk, JoinRow, LeaveRow, StepPlan

from .driver import GREEDY

if TYPE_CHECKING:
    import pytest

    from mlx_troupe.runtime.engine.engine import MlxEngine

MIB = 1 << 20


class Bench:
    """Sends plans and keeps what rows got."""

    def __init__(self, engine: MlxEngine) -> None:
        self.engine = engine
        self.said: list[Any] = []
        self.tokens: dict[int, list[int]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.failed: dict[int, str] = {}
        self.rows: list[int] = []
        self.log: list[str] = []
        self._step = 0
        self._plans: dict[int, tuple[int, ...]] = {}

    def plan(self, **parts: Any) -> int:
        """Run one plan over the rows that are in; returns its number."""
        self._step += 1
        self._plans[self._step] = tuple(self.rows)
        self.engine.run(StepPlan(self._step, tuple(self.rows), **parts), self.hear)
        return self._step

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.plan()

    def flush(self) -> None:
        """Commit what is outstanding."""
        self._step += 1
        self._plans[self._step] = ()
        self.engine.run(StepPlan(self._step), self.hear)

    def stage(self, row: int, prompt: list[int], *, chunk: int = 64, **options: Any) -> None:
        """Prefill all of a prompt but its last token; options go to the last chunk."""
        staged = prompt[:-1]
        starts = list(range(0, len(staged), chunk))
        for start in starts:
            extra = options if start == starts[-1] else {}
            outcome = self.chunk(Chunk(row, tuple(staged[start : start + chunk]), start, **extra))
            assert outcome.error is None

    def chunk(self, chunk: Chunk) -> ChunkOutcome:
        self.flush()
        self._step += 1
        self._plans[self._step] = ()
        self.engine.run(StepPlan(self._step, chunks=(chunk,)), self.hear)
        result = self.said[-1]
        assert isinstance(result, ChunksResult)
        return result.outcomes[0]

    def joining(self, row: int, prompt: list[int], *, source: int | None = None, **options: Any) -> JoinRow:
        """The message that lets a staged row in with the next plan."""
        self.rows.append(row)
        self.prompts[row], self.tokens[row] = prompt, []
        sampling = options.pop("sampling", GREEDY)
        return JoinRow(row, row if source is None else source, len(prompt) - 1, prompt[-1], sampling, **options)

    def join(self, row: int, prompt: list[int], **options: Any) -> None:
        """Stage a row, and let it in with a step."""
        self.stage(row, prompt)
        self.plan(joins=(self.joining(row, prompt, **options),), discards=(row,))

    def leaving(self, row: int, stash_pages: tuple[int, ...] = ()) -> LeaveRow:
        self.rows.remove(row)
        return LeaveRow(row, stash_pages)

    def leave(self, row: int, stash_pages: tuple[int, ...] = ()) -> None:
        self.plan(leaves=(self.leaving(row, stash_pages),))

    def hear(self, message: Any) -> None:
        self.said.append(message)
        match message:
            case StepResult():
                self.log.append(f"commit {message.step}")
                for row, token in zip(self._plans[message.step], message.tokens, strict=True):
                    self.tokens[row].append(token)
            case RowsFailed():
                self.log.append(f"failed {message.rows}")
                for row in message.rows:
                    self.failed[row] = message.error
                    if row in self.rows:
                        self.rows.remove(row)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Log the forwards, submissions, reads and samples of the engine from now on, among its commits."""
        engine, log = self.engine, self.log
        for name, target, method in (
            ("forward", engine._batch, "forward"),
            ("sample", engine._sampler, "sample"),
            ("submit", mx, "async_eval"),
        ):
            monkeypatch.setattr(target, method, _logged(getattr(target, method), name, log))
        read = Flight.read

        def logged_read(flight: Flight) -> list[int]:
            log.append(f"read {flight.step}")
            return read(flight)

        monkeypatch.setattr(Flight, "read", logged_read)
        log.clear()
        return log


def _logged(original: Any, name: str, log: list[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        log.append(name)
        return original(*args, **kwargs)

    return call


def settled_memory() -> int:
    """Bytes of live arrays, with nothing in flight."""
    import gc

    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()
