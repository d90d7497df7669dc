"""Prefill on the MLX thread: runs the chunks of a plan, short ones of several rows in one forward.

A chunk is run in pieces that end where it says. In each round every chunk that has pieces left runs its next one.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..faults import fault_of
from ..messages.decode import ChunkOutcome
from .kv.staged import StagedRow
from .kv.together import LONGEST_TOGETHER, Piece, extend_together, packs
from .prompt_reader import read_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..clock import Clock
    from ..events import PositionLogprobs
    from ..messages.executor import Chunk
    from .kv.shapes import LayerShape
    from .page_shelf import PageShelf
    from .prompt_reader import PromptReader

logger = logging.getLogger(__name__)


class _Work:
    """A chunk under way: the ends of its pieces to come, what it has taken, and what went wrong."""

    __slots__ = ("chunk", "ends", "error", "missed", "read", "seconds", "staged", "transient_bytes")

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        end = chunk.start + len(chunk.tokens)
        inner = {cut for cut in (*chunk.cuts, *chunk.checkpoints) if chunk.start < cut < end}
        self.ends = sorted({*inner, end} if chunk.tokens else inner)
        self.staged: StagedRow | None = None
        self.seconds = 0.0
        self.transient_bytes = 0
        self.error: Exception | None = None
        self.missed = False
        self.read: list[PositionLogprobs] = []

    @property
    def scored(self) -> bool:
        return self.chunk.reading is not None and self.chunk.reading.top_logprobs is not None

    @property
    def goes_on(self) -> bool:
        return bool(self.ends) and self.error is None and not self.missed

    def piece(self) -> Piece:
        """The next tokens."""
        assert self.staged is not None
        start = self.chunk.start
        return Piece(self.staged, self.chunk.tokens[self.staged.length - start : self.ends[0] - start])

    def outcome(self) -> ChunkOutcome:
        if self.error is None:
            transient = self.transient_bytes
            reading = None if self.staged is None else read_of(self.staged, self.chunk, self.read)
            return ChunkOutcome(
                self.chunk.row, self.seconds, restore_missed=self.missed, transient_bytes=transient, reading=reading
            )
        text = f"{type(self.error).__name__}: {self.error}"
        return ChunkOutcome(self.chunk.row, self.seconds, text, fault=fault_of(self.error, "state"))


class ChunkRunner:
    """See the module.

    Args:
        model: mlx-lm's.
        shapes: of the layers, when short pieces may be computed together (see `kv.together`).
        shelf: where pages come from and pieces go to.
        reader: runs pieces of prompts that are read.

    Attributes:
        staged: KV of rows whose prompt is being computed, by row.
        peak_bytes: the highest peak of MLX's memory before the last chunk; each chunk begins a new one.
    """

    def __init__(
        self, model: Any, shapes: list[LayerShape] | None, shelf: PageShelf, clock: Clock, reader: PromptReader
    ) -> None:
        self.staged: dict[int, StagedRow] = {}
        self.peak_bytes = 0
        self._model = model
        self._shapes = shapes
        self._shelf = shelf
        self._clock = clock
        self._reader = reader

    def run(self, chunks: Sequence[Chunk]) -> tuple[ChunkOutcome, ...]:
        """Run all; one that fails fails alone, and loses its row's KV."""
        works = [_Work(chunk) for chunk in chunks]
        for work in works:
            self._timed(work, self._begin)
        while waiting := [work for work in works if work.goes_on]:
            for pack in self._packs(waiting):
                if len(pack) == 1 or not self._run_together(pack):
                    for work in pack:
                        self._timed(work, self._run_alone)
                for work in pack:
                    self._timed(work, self._pass_end)
        for work in works:
            self._timed(work, self._put_aside)
        return tuple([work.outcome() for work in works])

    def _timed(self, work: _Work, run: Any) -> None:
        """Do one thing for a chunk that is well so far, and count its time and its fault."""
        if work.error is not None or work.missed:
            return
        began_s = self._clock.now()
        try:
            run(work)
        except Exception as error:
            logger.exception("a chunk of row %d failed", work.chunk.row)
            self.staged.pop(work.chunk.row, None)
            self._shelf.discard(work.chunk.row, work.chunk.stash)
            work.error = error
            mx.clear_cache()
        work.seconds += self._clock.now() - began_s

    def _begin(self, work: _Work) -> None:
        """Find the row's staged KV; on its first chunk begin it, from pages if there are any."""
        chunk = work.chunk
        first = chunk.start == chunk.restore_tokens
        if first and (chunk.restore_pages or chunk.row not in self.staged):
            staged = StagedRow(self._model, chunk.target)
            if chunk.restore_pages:
                pages = self._shelf.get(chunk.restore_pages)
                if pages is None:
                    work.missed = True
                    return
                staged.restore(pages, chunk.restore_tokens)
            self.staged[chunk.row] = staged
        work.staged = self.staged[chunk.row]
        if work.staged.length != chunk.start:
            raise ValueError(f"{work.staged.length} tokens are staged for row {chunk.row}, not {chunk.start}")

    def _packs(self, works: list[_Work]) -> list[list[_Work]]:
        """Whose next pieces go into one forward."""
        if self._shapes is None or len(works) == 1:
            return [[work] for work in works]
        short = [work for work in works if not work.scored and len(work.piece().tokens) <= LONGEST_TOGETHER]
        packed = [[work] for work in works if work not in short]
        for pooled in (False, True):  # vectors need another part of the model
            kind = [work for work in short if (work.chunk.reading is not None) is pooled]
            pieces = [work.piece() for work in kind]
            together = packs([len(piece.tokens) for piece in pieces], [piece.row.length for piece in pieces])
            packed += [[kind[i] for i in pack] for pack in together]
        return packed

    def _run_together(self, pack: list[_Work]) -> bool:
        """Whether it could be done. Each chunk's time is its share by tokens."""
        assert self._shapes is not None
        pieces = [work.piece() for work in pack]
        began_s = self._clock.now()
        try:
            if pack[0].chunk.reading is None:
                extend_together(self._model, self._shapes, pieces)
            else:
                self._reader.append_together(self._shapes, pieces, [work.chunk for work in pack])
        except Exception:
            logger.exception("%d prompts could not be computed together; each runs alone", len(pack))
            return False
        token_s = (self._clock.now() - began_s) / sum(len(piece.tokens) for piece in pieces)
        for work, piece in zip(pack, pieces, strict=True):
            work.seconds += token_s * len(piece.tokens)
        return True

    def _run_alone(self, work: _Work) -> None:
        staged, tokens = work.piece()
        self.peak_bytes = max(self.peak_bytes, mx.get_peak_memory())
        mx.reset_peak_memory()
        if work.chunk.reading is None:
            staged.append(tokens)
        else:
            work.read += self._reader.append(staged, tokens, work.chunk)
        work.transient_bytes = max(work.transient_bytes, mx.get_peak_memory() - mx.get_active_memory())

    def _pass_end(self, work: _Work) -> None:
        """A piece has run: keep the checkpoint that may be due at its end."""
        assert work.staged is not None
        end = work.ends.pop(0)
        if end in work.chunk.checkpoints:
            self._shelf.put_aside(work.chunk.row, end, partial(work.staged.cut, checkpoint=True))

    def _put_aside(self, work: _Work) -> None:
        """Keep the pieces that need no checkpoint."""
        assert work.staged is not None
        for end in work.chunk.stash:
            if end not in work.chunk.checkpoints:
                self._shelf.put_aside(work.chunk.row, end, work.staged.cut)
