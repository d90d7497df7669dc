"""The pinned thread: order, death, closing, and no array kept while idle."""

from __future__ import annotations

import threading
import weakref

import pytest

from mlx_troupe.runtime.mlx_thread import MlxThread, ThreadEnded


def test_invariant_8_jobs_run_in_order_on_one_thread_that_is_not_ours() -> None:
    thread = MlxThread()
    seen: list[tuple[int, int]] = []
    for number in range(50):
        thread.submit(lambda number=number: seen.append((number, threading.get_ident())))
    assert thread.close(timeout_s=10)
    assert [number for number, _ in seen] == list(range(50))
    idents = {ident for _, ident in seen}
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_a_job_that_raises_ends_it_and_is_told_once() -> None:
    told: list[BaseException] = []
    ran: list[int] = []
    thread = MlxThread(on_death=told.append)
    boom = ValueError("boom")

    def fail() -> None:
        raise boom

    thread.submit(lambda: ran.append(1))
    thread.submit(fail)
    assert thread.close(timeout_s=10)
    assert ran == [1]
    assert told == [boom]
    assert not thread.alive
    with pytest.raises(ThreadEnded):
        thread.submit(lambda: ran.append(2))
    assert thread.close()


def test_closing_runs_what_is_queued_and_refuses_more() -> None:
    told: list[BaseException] = []
    thread = MlxThread(on_death=told.append)
    gate = threading.Event()
    ran: list[int] = []
    thread.submit(gate.wait)
    thread.submit(lambda: ran.append(1))
    assert not thread.close(timeout_s=0.01), "a thread that is busy has not ended"
    gate.set()
    assert thread.close(timeout_s=10)
    assert ran == [1]
    assert told == []
    with pytest.raises(ThreadEnded):
        thread.submit(lambda: ran.append(2))


def test_it_may_be_closed_by_a_job_of_its_own() -> None:
    thread = MlxThread()
    thread.submit(thread.close)
    assert thread.close(timeout_s=10)


def test_a_job_is_forgotten_once_it_has_run() -> None:
    """While the thread waits it keeps nothing that the last job held."""

    class Held:
        pass

    thread = MlxThread()
    held, gone = Held(), threading.Event()
    weakref.finalize(held, gone.set)
    thread.submit(lambda held=held: None)
    del held
    assert gone.wait(10)
    thread.close()
