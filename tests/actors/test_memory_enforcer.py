"""The memory-enforcer: one hard limit, and what it asks of whom."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_troupe.actors.memory_enforcer import SAMPLE_INTERVAL_S, MemoryEnforcerActor, MemoryPolicy
from mlx_troupe.actors.memory_limits import RESUME_SHARE, Limits, Machine
from mlx_troupe.runtime.clock import ManualClock
from mlx_troupe.runtime.engine_protocol import EngineFacts
from mlx_troupe.runtime.messages.admission import PauseAdmission, SetMemoryLine
from mlx_troupe.runtime.messages.cache_store import Reclaim
from mlx_troupe.runtime.messages.decode import Preempt
from mlx_troupe.runtime.messages.executor import SampleMemory, SetMemoryLimit
from mlx_troupe.runtime.messages.memory_enforcer import MemorySample, Tick
from mlx_troupe.runtime.messages.prefill import SetChunkLine

MIB = 1 << 20
LIMIT = 1000 * MIB
LIMITS = Limits(LIMIT, LIMIT, "memory_limit_bytes", "memory_limit_bytes")


def sample(active: int, pool: int = 0) -> MemorySample:
    return MemorySample(active * MIB, pool * MIB, 0, 0.0)


@pytest.mark.parametrize(
    ("active", "pool", "footprint", "paused", "clear", "reclaim"),
    [
        (500, 100, 0, False, False, 0),
        (900, 200, 0, False, True, 0),
        (1100, 0, 0, True, False, 150),
        (1100, 50, 0, True, True, 150),
        (10, 0, 1200, True, False, 250),
        (10, 300, 1200, False, True, 0),
    ],
)
def test_decisions(active: int, pool: int, footprint: int, paused: bool, clear: bool, reclaim: int) -> None:
    decision = MemoryPolicy(LIMITS).decide(sample(active, pool), footprint * MIB)
    assert (decision.pause is not None) == paused
    assert decision.clear_pool == clear
    assert decision.reclaim_bytes == pytest.approx(reclaim * MIB, abs=1)
    if decision.pause:
        assert "MiB" in decision.pause


def test_it_goes_on_only_well_below_the_limit() -> None:
    policy = MemoryPolicy(LIMITS)
    uses = [900, 1001, 990, 951, 949, 990, 1001]
    paused = [policy.decide(sample(use), 0).pause is not None for use in uses]
    assert paused == [False, True, True, True, False, False, True]
    assert RESUME_SHARE == 0.95


class Listener:
    """Stands for another actor's Ref."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def tell(self, message: Any) -> None:
        self.heard.append(message)


class Watch:
    """A memory-enforcer among listeners."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.available_bytes = 1 << 40
        self.actor = MemoryEnforcerActor(
            EngineFacts(vocab_size=64, context_length=64),
            "balanced",
            LIMIT,
            inbox=8,
            clock=self.clock,
            footprint=lambda: 0,
            machine=lambda: Machine(total_bytes=0, available_bytes=self.available_bytes),
        )
        for name in ("admission", "cache_store", "decode", "executor", "prefill"):
            setattr(self.actor, name, Listener())

    def heard(self, name: str) -> list[Any]:
        """Take what one of them was told."""
        listener = getattr(self.actor, name)
        messages, listener.heard = listener.heard, []
        return messages

    def close(self) -> None:
        self.actor._send.close()
        self.actor._receive.close()


@pytest.fixture
def watch():
    watch = Watch()
    yield watch
    watch.close()


def test_one_sample_a_second_and_none_while_one_is_out(watch: Watch) -> None:
    watch.actor.handle(Tick())
    assert watch.heard("executor") == [SetMemoryLimit(LIMIT), SampleMemory()]
    watch.clock.advance(SAMPLE_INTERVAL_S)
    watch.actor.handle(Tick())
    assert watch.heard("executor") == [], "a busy thread is not asked twice"
    watch.actor.handle(sample(1))
    watch.actor.handle(Tick())
    assert watch.heard("executor") == [SampleMemory()]
    watch.actor.handle(sample(1))
    watch.clock.advance(SAMPLE_INTERVAL_S / 2)
    watch.actor.handle(Tick())
    assert watch.heard("executor") == []


def test_over_the_limit_it_reclaims_pauses_once_and_lifts_once(watch: Watch) -> None:
    watch.actor.handle(sample(1100))
    watch.actor.handle(sample(1090))
    assert [type(message) for message in watch.heard("cache_store")] == [Reclaim, Reclaim]
    (pause,) = watch.heard("admission")
    assert isinstance(pause, PauseAdmission)
    assert pause.reason is not None
    watch.actor.handle(sample(500))
    watch.actor.handle(sample(500))
    assert watch.heard("admission") == [PauseAdmission(None)]
    assert watch.actor.sample == sample(500)


def test_the_pool_is_emptied_at_once_but_not_in_a_loop(watch: Watch) -> None:
    watch.actor.handle(sample(900, pool=200))
    assert watch.heard("executor") == [SampleMemory(clear_pool=True)]
    watch.actor.handle(sample(900, pool=200))
    assert watch.heard("executor") == []
    watch.actor.handle(Tick())
    assert watch.heard("executor") == [SetMemoryLimit(LIMIT), SampleMemory()]
    watch.actor.handle(sample(900, pool=200))
    assert watch.heard("executor") == [SampleMemory(clear_pool=True)]


def test_what_stays_over_the_stable_line_costs_the_youngest_row(watch: Watch) -> None:
    watch.actor.handle(sample(1100))
    assert watch.heard("decode") == [], "prefixes are given up first"
    watch.actor.handle(sample(1100))
    (preempt,) = watch.heard("decode")
    assert isinstance(preempt, Preempt)
    assert "raise memory_limit_bytes" in preempt.reason
    watch.actor.handle(sample(980))
    assert watch.heard("decode") == [], "still paused, but below the line"


def test_a_line_that_moves_is_passed_on_and_never_preempts(watch: Watch) -> None:
    watch.actor.handle(Tick())
    watch.actor.handle(sample(600))
    assert watch.heard("admission") == []
    watch.available_bytes = 500 * MIB
    watch.clock.advance(SAMPLE_INTERVAL_S)
    watch.actor.handle(Tick())
    assert watch.heard("admission") == [SetMemoryLine(450 * MIB)]
    assert watch.heard("prefill") == [SetChunkLine(450 * MIB - watch.actor.base_bytes)]
    watch.actor.handle(sample(600))
    watch.actor.handle(sample(600))
    (pause,) = watch.heard("admission")
    assert "close other programs" in pause.reason
    assert watch.heard("decode") == [], "other programs' memory ends nobody's request"


def test_without_a_limit_it_is_a_share_of_the_machine() -> None:
    facts = EngineFacts(vocab_size=64, context_length=64)
    actor = MemoryEnforcerActor(facts, "safe", None, inbox=8, clock=ManualClock())
    assert actor.limits.abort_bytes > MIB
    assert actor.footprint_bytes > MIB
    actor._send.close()
    actor._receive.close()
