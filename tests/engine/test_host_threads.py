"""The number of BLAS threads follows what a step gains by them."""

from __future__ import annotations

import pytest

from mlx_troupe.runtime.clock import MonotonicClock
from mlx_troupe.runtime.engine import host_threads


@pytest.fixture
def threads(monkeypatch) -> list[int]:
    """What was set, with four threads to be had."""
    log: list[int] = []
    monkeypatch.setattr(host_threads, "most_threads", lambda: 4)
    monkeypatch.setattr(host_threads, "set_threads", log.append)
    monkeypatch.setattr(host_threads, "_asked", 1)
    return log


@pytest.mark.parametrize(
    ("one_s", "all_s", "chosen"), [(0.010, 0.009, 1), (0.010, 0.007, 4), (0.010, 0.010, 1), (9.0, 0.3, 4)]
)
def test_threads_that_gain_little_are_left_alone(one_s, all_s, chosen, threads, monkeypatch) -> None:
    monkeypatch.setattr(host_threads, "_step_s", lambda *_: one_s if threads[-1] == 1 else all_s)
    assert host_threads.choose_threads(None, MonotonicClock()) == chosen
    assert threads[-1] == chosen


def test_a_model_that_needs_threads_keeps_them_when_a_small_one_follows(threads, monkeypatch) -> None:
    monkeypatch.setattr(host_threads, "_step_s", lambda *_: 9.0 if threads[-1] == 1 else 0.1)
    host_threads.choose_threads(None, MonotonicClock())
    threads.clear()
    assert host_threads.choose_threads(None, MonotonicClock()) == 4
    assert threads == []


def test_without_openblas_nothing_is_measured(monkeypatch) -> None:
    monkeypatch.setattr(host_threads, "most_threads", lambda: None)
    assert host_threads.choose_threads(None, MonotonicClock()) is None


def test_a_step_is_timed(tiny_model) -> None:
    assert 0 < host_threads._step_s(tiny_model("llama"), MonotonicClock()) < 10
