"""A decode core and a fake engine on a bench, with every message in the hands of the test."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_troupe.actors.decode_core import DecodeCore
from mlx_troupe.runtime.clock import ManualClock
from mlx_troupe.runtime.engine_protocol import EngineFacts, StepMessage
from mlx_troupe.runtime.messages.admission import RowDone
from mlx_troupe.runtime.messages.cache_store import Store
from mlx_troupe.runtime.messages.decode import ChunksResult, Offer, RowsFailed, StepResult
from mlx_troupe.runtime.messages.executor import Chunk, StepPlan
from mlx_troupe.runtime.request import Request, State
from tests.fake_engine import Costs, FakeEngine

PAGE = 4


@dataclass
class Bench:
    """A decode core and an engine with a mailbox between, so that a test decides when each message arrives."""

    overlap: bool = True
    page_tokens: int = PAGE
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        facts = EngineFacts(
            vocab_size=64, context_length=4096, page_bytes=16, overlap="launch" if self.overlap else "off"
        )
        self.engine = FakeEngine(facts, page_tokens=PAGE, clock=self.clock, costs=self.costs)
        self.core = DecodeCore(overlap=self.overlap, page_tokens=self.page_tokens, clock=self.clock)
        self.emitted: list[StepMessage] = []

    def prefill(self, *rows: Request) -> None:
        """Stage the prompt of rows that share it, and hand them to decode."""
        first = rows[0]
        for request in rows:
            request.move(State.ADMITTED)
            request.move(State.PREFILLING)
            request.computed = request.prefill_target
        if first.prefill_target:
            self.core.offer(Offer((Chunk(first.leader, tuple(first.prompt[:-1]), 0),), 0.0))
            self.run_until(lambda: bool(self.core.to_prefill))
            self.core.to_prefill.clear()
        self.core.ready(rows)
        self.core.offer(Offer((), 0.0))

    def launch(self) -> StepPlan | None:
        """Build one plan and run it; what it emits waits in `emitted`."""
        plan = self.core.plan()
        if plan is not None:
            self.engine.run(plan, self.emitted.append)
        return plan

    def deliver(self) -> StepMessage:
        """Hand decode the oldest message."""
        message = self.emitted.pop(0)
        match message:
            case StepResult():
                self.core.commit(message)
            case ChunksResult():
                self.core.chunks_done(message)
            case RowsFailed():
                self.core.rows_failed(message)
        return message

    def run_until(self, done) -> None:
        """Go on as the actor would: plans as long as there are any, then one message, until `done()`."""
        for _ in range(10_000):
            while self.launch():
                pass
            if done():
                return
            if not self.emitted:
                raise AssertionError("nothing moves any more")
            self.deliver()
        raise AssertionError("no end")

    def finish(self) -> None:
        """Run until decode is idle; then nothing may be left anywhere."""
        self.run_until(lambda: self.core.idle)
        for message in self.core.to_cache:
            assert isinstance(message, Store)
            self.engine.adopt(message.row, tuple((end, 0) for end in message.ends))
        self.engine.check_empty()


def done_rows(bench: Bench) -> list[int]:
    return [message.row for message in bench.core.to_admission if isinstance(message, RowDone)]
