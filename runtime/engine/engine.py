"""The engine: one model on its MLX thread, stepping all rows at once, one step ahead of what the host has read.

    launch(plan k+1)  ->  commit(step k)  ->  emit StepResult k

Step k+1 is built on the still-lazy tokens of step k and handed to the device before those tokens are read, so the
device never waits for Python. In "build" mode (where launching ahead would copy KV, see `overlap`) the graph of k+1 is
built, k is read, and only then k+1 is submitted. "off" commits every step at once.

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
from ..messages.decode import ChunkOutcome, ChunksResult, RowsFailed
from ..messages.executor import StepPlan
from ..messages.memory_enforcer import MemorySample
from ..request import PLACEHOLDER
from .flight import Flight, marked
from .kv.staged import StagedRow
from .kv.together import LONGEST_TOGETHER, packs, prefill_together
from .page_shelf import PageShelf
from .prompt_reader import PromptReader, read_of
from .sampling import RowSampler

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..clock import Clock
    from ..constraint import Constraint
    from ..engine_protocol import EngineFacts, StepMessage
    from ..events import PositionLogprobs
    from ..messages.executor import Chunk, JoinRow, LeaveRow
    from ..page_blob import PageBlob
    from .kv.batch import Batch
    from .kv.pages import PageForm
    from .kv.shapes import LayerShape

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
    ) -> None:
        self.facts = facts
        self._model = model
        self._new_batch = new_batch
        self._shapes = shapes
        self._batch = new_batch()
        self._sampler = RowSampler(facts.vocab_size, xtc_special=xtc_special)
        self._clock = clock
        self._flight: Flight | None = None
        self._committed_s = 0.0
        self._tokens = mx.zeros((0,), mx.int32)
        self._token_order: list[int | None] = []
        self._fresh: dict[int, int] = {}
        self._constraints: dict[int, Constraint] = {}
        self._staged: dict[int, StagedRow] = {}
        self.shelf = PageShelf(page_tokens, page_form)
        self._peak_bytes = 0
        self._old_limit_bytes: int | None = None
        self._steps_to_trim: int | None = None
        self._reader = reader or PromptReader(model, facts.vocab_size)

    # --- one plan -----------------------------------------------------------------------------------------------

    def run(self, plan: StepPlan, emit: Emit) -> None:
        """See `Engine.run`."""
        if any(leave.stash for leave in plan.leaves):
            self._answer_first(emit)
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
            emit(ChunksResult(plan.step, self._run_chunks(plan.chunks)))

    def _answer_first(self, emit: Emit) -> None:
        """Invariant `the_answer_comes_before_the_kv_is_kept`.

        Copying a row's KV would wait for the step before anyway, so that step's tokens are read and told first.
        """
        try:
            self._commit(emit)
        except Exception as error:
            logger.exception("the step before could not be read")
            self._fail_all(StepPlan(0), error, emit)

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
        allowed = None
        if self._constraints:
            allowed, order = self._constrain(logits, order, plan, emit)
            if not any(row is not None for row in order):
                return
        elif self._sampler.waits(order):
            self._commit(emit)  # the draw will wait for this forward; what is known goes out before
        sampled = marked(self._sampler.sample(logits, order, allowed=allowed), logits)
        self._tokens, self._token_order, self._fresh = sampled.tokens, order, {}
        flight = Flight(plan.step, plan.rows, order, sampled, launched_s)
        if self.facts.overlap == "build":
            self._read(emit)
        mx.async_eval(sampled.tokens, *flight.lazy(), *self._sampler.extra(), *self._batch.recurrent_arrays())
        self._commit(emit)
        self._flight = flight

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
        if self.facts.overlap == "build":
            self._read(emit)
        mx.async_eval(logits)
        self._commit(emit)
        allowed = self._allowed(order, plan, emit)
        alive = set(self._batch.order)
        return allowed, [row if row in alive else None for row in order]

    def _allowed(self, order: list[int | None], plan: StepPlan, emit: Emit) -> mx.array:
        """Bit masks (places, words) of what each row may sample; all ones where nothing constrains it."""
        words = np.full((len(order), -(-self.facts.vocab_size // 32)), 0xFFFFFFFF, np.uint32)
        for place, row in enumerate(order):
            constraint = None if row is None else self._constraints.get(row)
            if constraint is None or row is None:
                continue
            try:
                words[place] = self._filled(constraint)
            except Exception as error:
                logger.warning("the constraint of row %d failed: %s", row, error)
                self._forget(row)
                emit(RowsFailed(plan.step, (row,), _text(error), code=getattr(error, "code", None)))
        return mx.array(words)

    def _filled(self, constraint: Constraint) -> np.ndarray:
        words = np.zeros(-(-self.facts.vocab_size // 32), np.uint32)
        constraint.fill(words)
        if self.facts.vocab_size % 32:
            words[-1] &= (1 << self.facts.vocab_size % 32) - 1
        if not words.any():
            raise ValueError("the constraint allows no token")
        return words

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

    # --- prefill ------------------------------------------------------------------------------------------------

    def _run_chunks(self, chunks: tuple[Chunk, ...]) -> tuple[ChunkOutcome, ...]:
        shared_s = self._stage_together(chunks)
        return tuple(self._run_chunk(chunk, shared_s.get(chunk.row)) for chunk in chunks)

    def _stage_together(self, chunks: tuple[Chunk, ...]) -> dict[int, float]:
        """Compute first chunks of short prompts in few forwards; seconds by row, each its share by tokens."""
        short = [
            chunk
            for chunk in chunks
            if chunk.start == 0
            and not (chunk.restore_pages or chunk.cuts or chunk.reading)
            and 0 < len(chunk.tokens) <= LONGEST_TOGETHER
            and all(end == len(chunk.tokens) for end in chunk.checkpoints)
        ]
        shared_s: dict[int, float] = {}
        if self._shapes is None or len(short) < 2:
            return shared_s
        for pack in packs([len(chunk.tokens) for chunk in short]):
            part = [short[index] for index in pack]
            if len(part) > 1:
                began_s = self._clock.now()
                try:
                    rows = prefill_together(self._model, self._shapes, [chunk.tokens for chunk in part])
                except Exception:
                    logger.exception("%d prompts could not be computed together; each runs alone", len(part))
                    continue
                each_s = (self._clock.now() - began_s) / sum(len(chunk.tokens) for chunk in part)
                for chunk, row in zip(part, rows, strict=True):
                    self._staged[chunk.row] = row
                    shared_s[chunk.row] = each_s * len(chunk.tokens)
        return shared_s

    def _run_chunk(self, chunk: Chunk, shared_s: float | None = None) -> ChunkOutcome:
        """Compute one chunk, unless that was done together with others in its `shared_s` seconds."""
        began_s = self._clock.now() - (shared_s or 0.0)
        self._note_peak()
        try:
            staged = self._staged[chunk.row] if shared_s is not None else self._staged_for(chunk)
            if staged is None:
                return ChunkOutcome(chunk.row, 0.0, restore_missed=True)
            if shared_s is None and staged.length != chunk.start:
                raise ValueError(f"{staged.length} tokens are staged for row {chunk.row}, not {chunk.start}")
            read = self._extend(staged, chunk)
        except Exception as error:
            logger.exception("a chunk of row %d failed", chunk.row)
            self._staged.pop(chunk.row, None)
            mx.clear_cache()
            seconds = self._clock.now() - began_s
            return ChunkOutcome(chunk.row, seconds, _text(error), fault=fault_of(error, "state"))
        transient = max(0, mx.get_peak_memory() - mx.get_active_memory()) if shared_s is None else 0
        seconds, reading = self._clock.now() - began_s, read_of(staged, chunk, read)
        return ChunkOutcome(chunk.row, seconds, transient_bytes=transient, reading=reading)

    def _note_peak(self) -> None:
        """Begin a new measurement of the peak, and keep the old one."""
        self._peak_bytes = max(self._peak_bytes, mx.get_peak_memory())
        mx.reset_peak_memory()

    def _extend(self, staged: StagedRow, chunk: Chunk) -> list[PositionLogprobs]:
        """Run the chunk's tokens, in pieces that end where it says, and put aside what it asks for."""
        read: list[PositionLogprobs] = []
        end = chunk.start + len(chunk.tokens)
        pieces = sorted({cut for cut in (*chunk.cuts, *chunk.checkpoints) if chunk.start < cut < end} | {end})
        for piece in pieces:
            if piece > staged.length:
                tokens = chunk.tokens[staged.length - chunk.start : piece - chunk.start]
                if chunk.reading is None:
                    staged.append(tokens)
                else:
                    read += self._reader.append(staged, tokens, chunk)
            if piece in chunk.checkpoints:
                self.shelf.put_aside(chunk.row, piece, partial(staged.cut, checkpoint=True))
        for stash in chunk.stash:
            if stash not in chunk.checkpoints:
                self.shelf.put_aside(chunk.row, stash, staged.cut)
        return read

    def _staged_for(self, chunk: Chunk) -> StagedRow | None:
        """The row's staged KV, begun from pages on its first chunk; None when a page is gone."""
        first = chunk.start == chunk.restore_tokens
        if not first or (chunk.row in self._staged and not chunk.restore_pages):
            return self._staged[chunk.row]
        staged = StagedRow(self._model)
        if chunk.restore_pages:
            pages = self.shelf.get(chunk.restore_pages)
            if pages is None:
                return None
            staged.restore(pages, chunk.restore_tokens)
        self._staged[chunk.row] = staged
        return staged

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
            mx.clear_cache()
        peak = max(self._peak_bytes, mx.get_peak_memory())
        return MemorySample(mx.get_active_memory(), mx.get_cache_memory(), peak, self._clock.now())

    def set_memory_limit(self, limit_bytes: int) -> None:
        """See `Engine.set_memory_limit`."""
        old = mx.set_memory_limit(limit_bytes)
        if self._old_limit_bytes is None:
            self._old_limit_bytes = old

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
        del self._batch, self._new_batch, self._sampler, self._tokens, self._model, self._reader
        mx.clear_cache()
        if self._old_limit_bytes is not None:
            mx.set_memory_limit(self._old_limit_bytes)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
