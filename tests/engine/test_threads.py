"""Invariant 8: an engine's arrays live and die on its thread, plain values leave it, several engines run at once."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from mlx_troupe.runtime.clock import MonotonicClock
from mlx_troupe.runtime.config import RuntimeConfig
from mlx_troupe.runtime.engine.build import build_engine
from mlx_troupe.runtime.mlx_thread import MlxThread
from mlx_troupe.runtime.sampling_params import SamplingParams
from tests.models.tiny import build_tiny

from .bench import settled_memory
from .conftest import CLASSES, VOCAB, random_prompts
from .driver import Driver, Job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROMPTS = random_prompts(6, seed=13)


class Worker:
    """An engine on a thread of its own, from loading to closing."""

    def __init__(self, architecture: str, folder: Path, overlap: str = "auto") -> None:
        self.folder = build_tiny(architecture, folder, vocab=VOCAB)
        self.deaths: list[BaseException] = []
        self.thread = MlxThread(architecture, self.deaths.append)
        self.config = RuntimeConfig(overlap=overlap, length_classes=CLASSES)  # type: ignore[arg-type]
        self.engine: Any = None
        self.messages: list[Any] = []
        self.outputs: dict[int, list[int]] = {}

    def start(self) -> threading.Event:
        """Load and run all jobs; set when done."""
        done = threading.Event()
        for job in (self._load, self._run, done.set):
            self.thread.submit(job)
        return done

    def _load(self) -> None:
        from mlx_lm import load

        model = load(str(self.folder))[0]
        self.engine = build_engine(model, self.config, MonotonicClock(), vocab_size=VOCAB, context_length=4096)

    def _run(self) -> None:
        penalised = SamplingParams(temperature=0.0, top_logprobs=2, repetition_penalty=1.0)
        jobs = [Job(row, prompt, 16, penalised) for row, prompt in enumerate(PROMPTS)]
        driver = Driver(self.engine, jobs, seed=1)
        self.outputs = driver.run()
        self.messages = driver.events

    def close(self) -> None:
        self.thread.submit(lambda: self.engine.close())
        assert self.thread.close(timeout_s=60)


@pytest.fixture
def worker(tmp_path: Path) -> Callable[..., Worker]:
    made: list[Worker] = []

    def make(architecture: str, **options: Any) -> Worker:
        made.append(Worker(architecture, tmp_path / f"{architecture}-{len(made)}", **options))
        return made[-1]

    yield make
    for each in made:
        each.thread.close(timeout_s=60)


def test_invariant_8_two_engines_on_two_threads_at_once(worker, solo) -> None:
    """Both load, measure, prefill and decode at the same time, and say what they say alone."""
    workers = [worker("llama"), worker("qwen3_next"), worker("llama", overlap="build")]
    done = [each.start() for each in workers]
    assert all(event.wait(120) for event in done)
    for each, architecture in zip(workers, ("llama", "qwen3_next", "llama"), strict=True):
        assert each.deaths == []
        for row, prompt in enumerate(PROMPTS):
            assert each.outputs[row] == solo(architecture, prompt, 16)
        each.close()


def test_invariant_8_only_plain_values_leave(worker) -> None:
    """Everything an engine emits can be written as JSON, which no array can."""
    each = worker("llama")
    assert each.start().wait(120)
    assert len(each.messages) > 20
    for message in each.messages:
        msgspec.json.encode(message)
    msgspec.json.encode(each.engine.facts)
    each.close()


@pytest.mark.parametrize("architecture", ["llama", "llama4"])
def test_invariant_8_arrays_die_on_the_thread(architecture, worker) -> None:
    """After `close` no array is left, weights included, though the engine object is still held elsewhere."""
    base = settled_memory()
    each = worker(architecture)
    assert each.start().wait(120)
    assert settled_memory() > base + 100_000
    each.close()
    gc.collect()
    left = settled_memory() - base
    assert each.engine is not None
    assert left < 4096, f"{left} bytes are left"


def test_invariant_8_rows_in_flight_are_freed_by_close(worker) -> None:
    """Close with rows decoding, a step in flight, staged KV and pages."""
    from .bench import Bench

    base = settled_memory()
    each = worker("llama")
    each.thread.submit(each._load)

    def leave_a_mess() -> None:
        bench = Bench(each.engine)
        bench.join(0, PROMPTS[0], sampling=SamplingParams(temperature=0.0, presence_penalty=0.5), history=(1, 2))
        bench.stage(1, [20] * 600, stash_pages=(0, 1))
        each.engine.adopt(1, ((0, 5),))
        bench.plan()

    each.thread.submit(leave_a_mess)
    each.close()
    assert each.deaths == []
    gc.collect()
    assert settled_memory() - base < 4096
