"""The engine: one model on its MLX thread, stepping all rows at once, one step ahead of what the host has read.

    launch(plan k+1)  ->  commit(step k)  ->  emit StepResult k

Step k+1 is built on the still-lazy tokens of step k and handed to the device before those tokens are read, so the
device never waits for Python. In "build" mode (where launching ahead would copy KV, see `overlap`) the graph of k+1 is
built, k is read, and only then k+1 is submitted. "off" commits every step at once. Where rows draw on the host (on
MLX's CPU backend) the graph of k+1 is built on an array that the draw of k fills once the forward of k is done.

Invariants (DESIGN section 3; tests carry these names): lengths advance at launch and tokens are filled at commit; a row
that ended is in flight once more; buffers of an in-flight plan stay alive by data flow; a new row joins without a
barrier; constrained rows wait only for their sample; overlap on and off give the same tokens; everything lives and
dies on this thread.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ..faults import fault_of
from ..grammar.masks import MaskFiller
from ..messages.decode import ChunkOutcome, ChunksResult, RowsFailed
from ..messages.executor import StepPlan
from ..messages.memory_enforcer import MemorySample
from ..peers import SharedLimit
from ..request import PLACEHOLDER
from .chunks import ChunkRunner
from .device import empty_pool, pool_bytes
from .flight import Flight, marked, marked_on_host
from .kv.staged import StagedRow
from .page_shelf import PageShelf
from .prompt_reader import PromptReader
from .sampling import RowSampler

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..clock import Clock
    from ..constraint import Constraint
    from ..engine_protocol import EngineFacts, StepMessage
    from ..messages.executor import Chunk, JoinRow, LeaveRow
    from ..page_blob import PageBlob
    from .kv.batch import Batch
    from .kv.pages import PageForm
    from .kv.shapes import LayerShape
    from .sampling import Sampled

    Emit = Callable[[StepMessage], None]

logger = logging.getLogger(__name__)

TRIM_AFTER_STEPS = 8
LARGE_POOL_BYTES = 2 << 30


class MlxEngine:
    """See the module. Built by `build_engine` on the MLX thread; every method runs there.

    Args:
        model: mlx-lm's.
        new_batch: makes an empty batch; called again after a forward failed.
        facts: what policy was told; `overlap` says how steps are launched.
        page_tokens: tokens of a page.
        xtc_special: ids that XTC never drops.
        page_form: what pages from disk must look like; None takes any.
        shapes: of the layers, when short prompts may be computed together (see `kv.together`).
        reader: reads log-probabilities and vectors off prompts; made here when None.
        limit: MLX's memory limit, shared with other engines of the process; its own when None.
    """

    def __init__(
        self,
        model: Any,
        new_batch: Callable[[], Batch],
        facts: EngineFacts,
        *,
        page_tokens: int,
        clock: Clock,
        xtc_special: tuple[int, ...] = (),
        page_form: PageForm | None = None,
        shapes: list[LayerShape] | None = None,
        reader: PromptReader | None = None,
        limit: SharedLimit | None = None,
    ) -> None:
        self.facts = facts
        self._model = model
        self._new_batch = new_batch
        self._batch = new_batch()
        self._sampler = RowSampler(facts.vocab_size, xtc_special=xtc_special)
        self._clock = clock
        self._flight: Flight | None = None
        self._committed_s = 0.0
        self._tokens = mx.zeros((0,), mx.int32)
        self._token_order: list[int | None] = []
        self._fresh: dict[int, int] = {}
        self._constraints: dict[int, Constraint] = {}
        self._masks = MaskFiller()
        self.shelf = PageShelf(page_tokens, page_form)
        self._chunks = ChunkRunner(model, shapes, self.shelf, clock, reader or PromptReader(model, facts.vocab_size))
        self._staged = self._chunks.staged
        self._limit = limit or SharedLimit()
        self._steps_to_trim: int | None = None

    # --- one plan -----------------------------------------------------------------------------------------------

    def run(self, plan: StepPlan, emit: Emit) -> None:
        """See `Engine.run`."""
        if any(leave.stash for leave in plan.leaves):
            self._answer_first(emit)
        elif plan.joins or plan.leaves:
            self._draw_first(plan, emit)
        self._change_rows(plan, emit)
        self._trim_pool()
        try:
            if plan.rows:
                self._launch(plan, emit)
            else:
                self._commit(emit)
            if plan.chunks or self.facts.overlap == "off":
                self._commit(emit)
        except Exception as error:
            logger.exception("step %d failed", plan.step)
            self._fail_all(plan, error, emit)
        if plan.chunks:
            crowded = 0 < plan.chunks_below_bytes < mx.get_active_memory()
            outcomes = _crowded(plan.chunks) if crowded else self._run_chunks(plan.chunks)
            emit(ChunksResult(plan.step, outcomes, mx.get_active_memory()))

    def _answer_first(self, emit: Emit) -> None:
        """Invariant `the_answer_comes_before_the_kv_is_kept`.

        Copying a row's KV would wait for the step before anyway, so that step's tokens are read and told first.
        """
        try:
            self._commit(emit)
        except Exception as error:
            logger.exception("the step before could not be read")
            self._fail_all(StepPlan(0), error, emit)

    def _draw_first(self, plan: StepPlan, emit: Emit) -> None:
        """Tokens whose draw was put off are drawn while the batch is still as it was."""
        try:
            if self._flight is not None:
                _ = self._flight.sampled
        except Exception as error:
            logger.exception("the step before could not be drawn")
            self._fail_all(StepPlan(plan.step), error, emit)

    def _change_rows(self, plan: StepPlan, emit: Emit) -> None:
        for leave in plan.leaves:
            self._leave(leave)
        self._reserve(plan.joins)
        for join in plan.joins:
            try:
                self._join(join)
            except Exception as error:
                logger.exception("row %d could not join", join.row)
                self._forget(join.row)
                emit(RowsFailed(plan.step, (join.row,), _text(error), fault_of(error, "state")))
        for row in plan.discards:
            self._staged.pop(row, None)
        try:
            self._batch.settle()
        except Exception:
            logger.exception("rows could not be rearranged and stay where they are")

    def _reserve(self, joins: tuple[JoinRow, ...]) -> None:
        if len(joins) > 1:
            try:
                self._batch.reserve([join.staged_tokens for join in joins])
            except Exception:
                logger.exception("room for %d rows could not be made at once", len(joins))

    def _launch(self, plan: StepPlan, emit: Emit) -> None:
        order = self._batch.order
        if not order:
            self._commit(emit)
            return
        launched_s = self._clock.now()
        logits = self._batch.forward(self._inputs(order))[:, -1]
        if not self._constraints and self._sampler.waits(order):
            self._tokens = mx.array(np.zeros(len(order), np.int32))
            draw, submitted = partial(self._draw_on_host, logits, order, self._tokens), [logits]
            flight = Flight(plan.step, plan.rows, order, draw, launched_s, put_off=True)
        else:
            allowed = None
            if self._constraints:
                allowed, order = self._constrain(logits, order, plan, emit)
                if not any(row is not None for row in order):
                    return
            sampled = marked(self._sampler.sample(logits, order, allowed=allowed), logits)
            self._tokens = sampled.tokens
            flight = Flight(plan.step, plan.rows, order, lambda: sampled, launched_s)
            submitted = [sampled.tokens, *flight.lazy(), *self._sampler.extra()]
        self._token_order, self._fresh = order, {}
        self._submit([*submitted, *self._batch.recurrent_arrays()], emit)
        self._commit(emit)
        self._flight = flight

    def _draw_on_host(self, logits: mx.array, order: list[int | None], tokens: mx.array) -> Sampled:
        """Wait for a forward and draw. `tokens`, which the next forward is built on already, gets its values here."""
        alive = set(self._batch.order)  # a row may have failed since
        sampled = self._sampler.sample(logits, [row if row in alive else None for row in order])
        np.asarray(tokens)[:] = marked_on_host(sampled, logits)
        sampled = sampled._replace(tokens=tokens)
        mx.async_eval(*sampled.arrays(), *self._sampler.extra())
        return sampled

    def _submit(self, arrays: list[mx.array], emit: Emit) -> None:
        """Start the device. The step before is read first where these wait for its draw, or by choice of overlap."""
        if self.facts.overlap == "build" or (self._flight is not None and self._flight.undrawn):
            self._read(emit)
        mx.async_eval(*arrays)

    def _inputs(self, order: list[int | None]) -> mx.array:
        """Next input token of every place, int32 (places, 1): lazy tokens of the last step, host ones of new rows.

        Invariant `a_row_joins_without_a_barrier`: the last step's tokens are not read for it.
        """
        if not self._fresh and order == self._token_order:
            return self._tokens[:, None]
        known_rows = [*self._token_order, *self._fresh]
        at = {row: place for place, row in enumerate(known_rows) if row is not None}
        index = [0 if row is None else at[row] for row in order]
        known = mx.array(list(self._fresh.values()), dtype=mx.int32)
        every = mx.concatenate([self._tokens, known]) if self._token_order else known
        return every[mx.array(index, dtype=mx.int32)][:, None]

    def _read(self, emit: Emit) -> list[int]:
        """Wait for the tokens of the step in flight. When they cannot be had its rows fail, and the error is raised."""
        if self._flight is None:
            return []
        try:
            return self._flight.read()
        except Exception as error:
            lost, self._flight = self._flight, None
            emit(RowsFailed(lost.step, lost.rows, _text(error), fault_of(error, "step")))
            raise

    def _commit(self, emit: Emit) -> None:
        tokens = self._read(emit)
        flight, self._flight = self._flight, None
        if flight is None:
            return
        now_s = self._clock.now()
        result = flight.result(tokens, now_s - max(flight.launched_s, self._committed_s))
        self._committed_s = now_s
        self._throw_out_bad(flight, tokens, emit)
        failed = self._accept(result.tokens, flight)
        emit(result)
        for row, error in failed.items():
            emit(RowsFailed(flight.step, (row,), _text(error), code=getattr(error, "code", None)))

    def _throw_out_bad(self, flight: Flight, tokens: list[int], emit: Emit) -> None:
        """Rows whose logits were not numbers leave the batch, before anybody reads their token."""
        bad = [row for row, token in zip(flight.order, tokens, strict=True) if token == PLACEHOLDER and row is not None]
        present = set(self._batch.order) if bad else set()
        for row in bad:
            if row in present:
                self._forget(row)
                emit(RowsFailed(flight.step, (row,), "the logits are not finite numbers", "state"))

    # --- constrained rows ---------------------------------------------------------------------------------------

    def _accept(self, tokens: tuple[int, ...], flight: Flight) -> dict[int, Exception]:
        failed: dict[int, Exception] = {}
        if not self._constraints:
            return failed
        for row, token in zip(flight.rows, tokens, strict=True):
            constraint = self._constraints.get(row)
            if constraint is None or token == PLACEHOLDER:
                continue
            try:
                constraint.accept(token)
            except Exception as error:
                logger.warning("the constraint of row %d failed: %s", row, error)
                failed[row] = error
                self._forget(row)
        return failed

    def _constrain(
        self, logits: mx.array, order: list[int | None], plan: StepPlan, emit: Emit
    ) -> tuple[mx.array, list[int | None]]:
        """Invariant `only_the_sample_waits`: submit the forward, commit the step before, then compute masks.

        Returns the masks, and the order with None for rows whose constraint failed meanwhile.
        """
        self._submit([logits], emit)
        self._commit(emit)
        allowed = self._allowed(order, plan, emit)
        alive = set(self._batch.order)
        return allowed, [row if row in alive else None for row in order]

    def _allowed(self, order: list[int | None], plan: StepPlan, emit: Emit) -> mx.array:
        """Bit masks (places, words) of what each row may sample; all ones where nothing constrains it."""
        words = np.full((len(order), -(-self.facts.vocab_size // 32)), 0xFFFFFFFF, np.uint32)
        bound = [place for place, row in enumerate(order) if row in self._constraints]
        masks = np.zeros((len(bound), words.shape[1]), np.uint32)
        rows = [row for row in order if row in self._constraints and row is not None]
        errors = self._masks.fill([self._constraints[row] for row in rows], masks)
        if self.facts.vocab_size % 32:
            masks[:, -1] &= (1 << self.facts.vocab_size % 32) - 1
        for row, place, mask, error in zip(rows, bound, masks, errors, strict=True):
            if error is None and mask.any():
                words[place] = mask
                continue
            error = error or ValueError("the constraint allows no token")
            logger.warning("the constraint of row %d failed: %s", row, error)
            self._forget(row)
            emit(RowsFailed(plan.step, (row,), _text(error), code=getattr(error, "code", None)))
        return mx.array(words)

    # --- rows ---------------------------------------------------------------------------------------------------

    def _join(self, join: JoinRow) -> None:
        staged = self._staged.get(join.source)
        if staged is None:
            if join.staged_tokens:
                raise KeyError(f"no KV is staged for row {join.source}")
            staged = StagedRow(self._model)
        if staged.length != join.staged_tokens:
            raise ValueError(f"{staged.length} tokens are staged for row {join.source}, not {join.staged_tokens}")
        self._sampler.join(join.row, join.sampling, join.history, join.position)
        if join.suppress and join.position < join.suppress_until:
            self._sampler.suppress_until(join.row, join.suppress, join.suppress_until)
        if join.constraint is not None:
            self._constraints[join.row] = join.constraint
        self._batch.join(join.row, staged)
        self._fresh[join.row] = join.token

    def _leave(self, leave: LeaveRow) -> None:
        if leave.row not in self._batch.order:
            return
        for end in leave.stash:
            self.shelf.put_aside(leave.row, end, lambda low, high: self._batch.export(leave.row, low, high))
        self._forget(leave.row)
        self._steps_to_trim = TRIM_AFTER_STEPS

    def _forget(self, row: int) -> None:
        """Take a row out wherever it is; one that failed to join may be in some places only."""
        if row in self._batch.order:
            self._batch.leave(row)
        with suppress(KeyError):
            self._sampler.leave(row)
        self._fresh.pop(row, None)
        self._constraints.pop(row, None)

    def _fail_all(self, plan: StepPlan, error: Exception, emit: Emit) -> None:
        """A forward that raised may have left any layer half written: start the batch anew."""
        try:
            self._commit(emit)
        except Exception:
            logger.exception("the step before could not be read either")
        rows = [row for row in self._batch.order if row is not None]
        for row in rows:
            self._sampler.leave(row)
        self._batch = self._new_batch()
        self._tokens, self._token_order, self._fresh = mx.zeros((0,), mx.int32), [], {}
        self._constraints.clear()
        if failed := tuple(dict.fromkeys([*plan.rows, *rows])):
            emit(RowsFailed(plan.step, failed, _text(error), fault_of(error, "step")))
        mx.clear_cache()

    def _run_chunks(self, chunks: tuple[Chunk, ...]) -> tuple[ChunkOutcome, ...]:
        return self._chunks.run(chunks)

    # --- pages and memory ---------------------------------------------------------------------------------------

    def adopt(self, row: int, pages: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        """See `Engine.adopt`."""
        return self.shelf.adopt(row, pages)

    def drop(self, pages: tuple[int, ...]) -> None:
        """See `Engine.drop`."""
        self.shelf.drop(pages)

    def read_page(self, page: int) -> PageBlob | None:
        """See `Engine.read_page`."""
        return self.shelf.read(page)

    def load_page(self, page: int, blob: PageBlob) -> None:
        """See `Engine.load_page`."""
        self.shelf.load(page, blob)

    def sample_memory(self, *, clear_pool: bool = False) -> MemorySample:
        """See `Engine.sample_memory`."""
        if clear_pool:
            empty_pool()
        peak = max(self._chunks.peak_bytes, mx.get_peak_memory())
        return MemorySample(mx.get_active_memory(), pool_bytes(), peak, self._clock.now())

    def set_memory_limit(self, limit_bytes: int) -> None:
        """See `Engine.set_memory_limit`."""
        self._limit.hold(self, mx.set_memory_limit, limit_bytes)

    def _trim_pool(self) -> None:
        """Some steps after the last row left, give back a pool that has grown large; never at once, never per token."""
        if self._steps_to_trim is None:
            return
        self._steps_to_trim -= 1
        if self._steps_to_trim > 0:
            return
        self._steps_to_trim = None
        if mx.get_cache_memory() > LARGE_POOL_BYTES:
            mx.clear_cache()

    def close(self) -> None:
        """See `Engine.close`. Invariant `arrays_die_on_the_thread`: none is left in any attribute."""
        for held in (self._constraints, self._staged, self.shelf, self._fresh):
            held.clear()
        self._flight = None
        del self._batch, self._new_batch, self._sampler, self._tokens, self._model, self._chunks
        empty_pool()
        self._limit.let_go(self, mx.set_memory_limit)


def _crowded(chunks: tuple[Chunk, ...]) -> tuple[ChunkOutcome, ...]:
    """What is said of chunks that did not run because too much memory is in use."""
    return tuple([ChunkOutcome(chunk.row, 0.0, crowded=True) for chunk in chunks])


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
