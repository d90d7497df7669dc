"""Steps of the engine on rows of zero KV: by rows, context, layout, overlap and compilation; joins and leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import msgspec
from mlx.utils import tree_flatten

from mlx_troupe.runtime.clock import MonotonicClock
from mlx_troupe.runtime.config import RuntimeConfig
from mlx_troupe.runtime.engine.engine import MlxEngine
from mlx_troupe.runtime.engine.kernels import ragged_attention
from mlx_troupe.runtime.engine.kv.pages import leaf_caches, token_bytes
from mlx_troupe.runtime.engine.kv.staged import StagedRow
from mlx_troupe.runtime.engine.probe import Layout, choose_layout
from mlx_troupe.runtime.engine_protocol import EngineFacts
from mlx_troupe.runtime.messages.executor import JoinRow, LeaveRow, StepPlan
from mlx_troupe.runtime.sampling_params import SamplingParams

from .case import Case, best_s, extra_s

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .machine import MachineRates

WARM_STEPS = 8
STEPS_A_TIMING = 4
GREEDY = SamplingParams(temperature=0.0)


class StepSettings(msgspec.Struct, frozen=True):
    """One way of stepping. `compiled` None takes what the probe found."""

    rows: int
    context: int
    overlap: str = "build"
    layout: str = "batched"
    compiled: bool | None = None


class StepBench:
    """A model and its measured layout; makes engines whose rows hold `context` tokens of zeros.

    Args:
        model: mlx-lm's, evaluated.
        vocab: ids it scores.
    """

    def __init__(self, model: Any, vocab: int) -> None:
        self.layout = choose_layout(model, ragged_attention())
        self._model = model
        self._vocab = vocab
        self._classes = RuntimeConfig().length_classes
        sizes = {name: value.nbytes for name, value in tree_flatten(model.parameters())}
        self.weight_bytes = sum(sizes.values())
        self.parameters = sum(value.size for _, value in tree_flatten(model.parameters()))
        staged = StagedRow(model)
        staged.append([0])
        self.token_bytes = token_bytes(staged.caches)

    def engine(self, settings: StepSettings) -> MlxEngine:
        """An engine without rows."""
        layout = self.layout
        if settings.layout == "row-by-row":
            layout = Layout("row-by-row", "as asked", None)
        elif settings.compiled is not None:
            layout = layout._replace(compiled=settings.compiled)
        facts = EngineFacts(vocab_size=self._vocab, context_length=1 << 20, overlap=settings.overlap)
        new_batch = layout.new_batch(self._model, self._classes)
        return MlxEngine(self._model, new_batch, facts, page_tokens=256, clock=MonotonicClock())

    def staged(self, context: int) -> StagedRow:
        """A row of zero KV, as if `context` tokens had been prefilled; for plain caches."""
        staged = StagedRow(self._model)
        staged.append([0])
        for cache in leaf_caches(staged.caches):
            one, two = cache.keys, cache.values
            cache.keys = mx.zeros((*one.shape[:2], context, one.shape[3]), one.dtype)
            cache.values = mx.zeros((*two.shape[:2], context, two.shape[3]), two.dtype)
            cache.offset = context
        mx.eval([(cache.keys, cache.values) for cache in leaf_caches(staged.caches)])
        staged.length = context
        return staged

    def floor(self, rates: MachineRates, rows: int, context: int) -> tuple[float, str]:
        """Weights read once and every row's KV once, or two operations a weight and row."""
        return rates.floor_s(self.weight_bytes + rows * context * self.token_bytes, 2.0 * self.parameters * rows)


class Stepping:
    """An engine with rows in it, driven plan by plan."""

    def __init__(self, bench: StepBench, settings: StepSettings) -> None:
        self.engine = bench.engine(settings)
        self.rows = tuple(range(settings.rows))
        self._step = 0
        for row in self.rows:
            self.engine._staged[row] = bench.staged(settings.context)
        joins = tuple(JoinRow(row, row, settings.context, 1, GREEDY) for row in self.rows)
        self.send(joins=joins, discards=self.rows)
        for _ in range(WARM_STEPS):
            self.send()

    def send(self, **parts: Any) -> None:
        """One plan; the step before it is read."""
        self._step += 1
        self.engine.run(StepPlan(self._step, self.rows, **parts), lambda message: None)

    def read(self) -> None:
        """Wait for the step in flight."""
        self._step += 1
        self.engine.run(StepPlan(self._step), lambda message: None)

    def steps(self) -> None:
        """Some steps, all of them done at the end."""
        for _ in range(STEPS_A_TIMING):
            self.send()
        self.read()


def step_cases(
    bench: StepBench, rates: MachineRates, rows: list[int], contexts: list[int], repeats: int
) -> Iterator[Case]:
    """Rows x contexts, then the other ways at the middle of both."""
    for count in rows:
        for context in contexts:
            yield _step(bench, rates, StepSettings(count, context), repeats)
    middle = StepSettings(rows[len(rows) // 2], contexts[len(contexts) // 2])
    for overlap in ("off", "build", "launch"):
        yield _step(bench, rates, msgspec.structs.replace(middle, overlap=overlap), repeats)
    yield _step(bench, rates, msgspec.structs.replace(middle, layout="row-by-row"), repeats)
    for compiled in (False, True):
        settings = msgspec.structs.replace(middle, compiled=compiled)
        if bench.layout.kernel is None:
            why = "this backend has no ragged kernel, without which a step is not compiled"
            yield Case(part="step", case=_named(settings), skipped=why)
        else:
            yield _step(bench, rates, settings, repeats)


def _named(settings: StepSettings) -> str:
    compiled = {None: "", True: ", compiled", False: ", not compiled"}[settings.compiled]
    return f"{settings.rows} rows x {settings.context}, {settings.layout}, overlap {settings.overlap}{compiled}"


def _step(bench: StepBench, rates: MachineRates, settings: StepSettings, repeats: int) -> Case:
    stepping = Stepping(bench, settings)
    seconds = best_s(stepping.steps, repeats=repeats) / STEPS_A_TIMING
    floor_s, floor = bench.floor(rates, settings.rows, settings.context)
    return Case(part="step", case=_named(settings), measured_s=seconds, floor_s=floor_s, floor=floor)


def join_cases(
    bench: StepBench, rates: MachineRates, rows: list[int], contexts: list[int], repeats: int
) -> Iterator[Case]:
    """A row joins and one leaves, beside the rows that stay: time of the step with it, less that of a plain one."""
    count = rows[len(rows) // 2]
    for context in contexts:
        stepping = Stepping(bench, StepSettings(count, context, "off"))
        staged = bench.staged(context)
        newcomer = count

        def swap(stepping: Stepping = stepping, staged: StagedRow = staged, context: int = context) -> None:
            nonlocal newcomer
            gone, stayed = stepping.rows[0], stepping.rows[1:]
            stepping.engine._staged[newcomer] = staged
            stepping.rows = (*stayed, newcomer)
            join = JoinRow(newcomer, newcomer, context, 1, GREEDY)
            stepping.send(joins=(join,), leaves=(LeaveRow(gone),), discards=(newcomer,))
            newcomer += 1

        swap()
        seconds = extra_s(stepping.send, swap, repeats)
        floor_s, floor = rates.floor_s(2.0 * context * bench.token_bytes)
        yield Case(
            part="join and leave",
            case=f"one of {count} rows, {context} tokens, beyond a step",
            measured_s=seconds,
            floor_s=floor_s,
            floor=f"row read and written: {floor}",
        )
