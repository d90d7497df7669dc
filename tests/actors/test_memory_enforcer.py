"""The memory-enforcer: one hard limit, and what it asks of whom."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_troupe.actors.memory_enforcer import (
    RESUME_SHARE,
    SAMPLE_INTERVAL_S,
    MemoryEnforcerActor,
    MemoryPolicy,
)
from mlx_troupe.runtime.clock import ManualClock
from mlx_troupe.runtime.messages.admission import PauseAdmission
from mlx_troupe.runtime.messages.cache_store import Reclaim
from mlx_troupe.runtime.messages.executor import SampleMemory
from mlx_troupe.runtime.messages.memory_enforcer import MemorySample, Tick

MIB = 1 << 20
LIMIT = 1000 * MIB


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
    decision = MemoryPolicy(LIMIT).decide(sample(active, pool), footprint * MIB)
    assert (decision.pause is not None) == paused
    assert decision.clear_pool == clear
    assert decision.reclaim_bytes == pytest.approx(reclaim * MIB, abs=1)
    if decision.pause:
        assert "MiB" in decision.pause


def test_it_goes_on_only_well_below_the_limit() -> None:
    policy = MemoryPolicy(LIMIT)
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
        self.actor = MemoryEnforcerActor(LIMIT, inbox=8, clock=self.clock, footprint=lambda: 0)
        self.actor.admission, self.actor.cache_store, self.actor.executor = (Listener() for _ in range(3))  # type: ignore[assignment]

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
    assert watch.heard("executor") == [SampleMemory()]
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
    assert watch.heard("executor") == [SampleMemory()]
    watch.actor.handle(sample(900, pool=200))
    assert watch.heard("executor") == [SampleMemory(clear_pool=True)]


def test_without_a_limit_it_is_a_share_of_the_machine() -> None:
    actor = MemoryEnforcerActor(None, inbox=8, clock=ManualClock())
    assert actor.policy.limit_bytes > MIB
    assert actor._footprint() > MIB
    actor._send.close()
    actor._receive.close()
