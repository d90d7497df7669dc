"""All decoding rows of one engine: the small protocol the engine drives (join, leave, forward, rewind, export).

Rows are kept in groups by length class, so that one long row does not make all others as wide as itself. The order of
slots over all groups is the order of the batch. Owned by the MLX thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import mlx.core as mx

from .compiled import CompiledStep
from .group import RowGroup, slots_for
from .pages import StoredPage, owned
from .shapes import ArraysShape, LayerShape, leaves
from .split import SplitLayers

if TYPE_CHECKING:
    from ..kernels import RaggedAttention
    from .staged import StagedRow

ClassForward = Literal["split", "per-class"]


class Batch(Protocol):
    """What the engine needs of the rows; the batched and the row-by-row way both give it."""

    @property
    def order(self) -> list[int | None]:
        """Row number of each place in the batch; None for a place whose results mean nothing."""
        ...

    def reserve(self, lengths: list[int]) -> None:
        """Rows of these lengths are about to join."""
        ...

    def join(self, row: int, staged: StagedRow) -> None:
        """Add a row with a copy of the staged KV."""
        ...

    def leave(self, row: int) -> None:
        """Remove a row."""
        ...

    def forward(self, tokens: mx.array) -> mx.array:
        """Run int32 (places, n) tokens; returns lazy logits (places, n, vocabulary). Lengths advance at once."""
        ...

    def checkpoint(self) -> None:
        """Remember the present, so that `rewind` may go back to any token after it."""
        ...

    def rewind(self, counts: dict[int, int]) -> None:
        """Take back each row's last n tokens, all after the last checkpoint for models with recurrent state."""
        ...

    def length(self, row: int) -> int:
        """Tokens of a row whose KV is computed or in flight."""
        ...

    def export(self, row: int, low: int, high: int) -> StoredPage:
        """Tokens low .. high - 1 of a row, copied and evaluated. Only for models whose every layer can be cut."""
        ...

    def arrays(self) -> list[mx.array]:
        """Everything held on the device."""
        ...

    def recurrent_arrays(self) -> list[mx.array]:
        """State that a step may leave unevaluated: it must be evaluated with the step or its graph grows."""
        ...

    def settle(self) -> None:
        """Between steps: compact, move rows between classes. May change `order`."""
        ...


class RowBatch:
    """Rows in shared buffers.

    Args:
        model: mlx-lm's.
        shapes: from `learn_shapes`.
        classes: upper bounds of the length classes, in tokens; longer rows share the last.
        class_forward: how several classes share a step.
        kernel: attends over ragged rows where it fits; None masks.
        compiled: one-token steps are compiled where every layer takes the kernel.
    """

    def __init__(
        self,
        model: Any,
        shapes: list[LayerShape],
        classes: tuple[int, ...],
        class_forward: ClassForward = "split",
        kernel: RaggedAttention | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        self._model = model
        self._shapes = shapes
        self._kernel = kernel
        self._compiled = CompiledStep(model) if compiled and kernel is not None and class_forward == "split" else None
        self._bounds = sorted(classes) or [1 << 62]
        self._class_forward: ClassForward = class_forward
        self._groups: dict[int, RowGroup] = {}
        self._home: dict[int, int] = {}
        self._split: SplitLayers | None = None
        self._recurrent = any(isinstance(shape, ArraysShape) for shape in leaves(shapes))
        self._saved: dict[int, list[list[mx.array | None]]] | None = None
        self._since: list[mx.array] = []

    @property
    def order(self) -> list[int | None]:
        """See `Batch.order`."""
        return [row for group in self._active() for row in group.rows]

    def _active(self) -> list[RowGroup]:
        return [self._groups[bound] for bound in sorted(self._groups)]

    def _bound(self, length: int) -> int:
        """The class a row joins: with headroom, so that it does not move at once."""
        for bound in self._bounds:
            if length + min(256, bound // 4) <= bound:
                return bound
        return self._bounds[-1]

    def reserve(self, lengths: list[int]) -> None:
        """See `Batch.reserve`."""
        self._saved = None
        homes: dict[int, list[int]] = {}
        for length in lengths:
            homes.setdefault(self._bound(length), []).append(length)
        for bound, own in homes.items():
            if bound in self._groups:
                self._groups[bound].reserve(len(own), max(own))
            else:
                group = RowGroup(self._shapes, slots_for(len(own)), kernel=self._kernel)
                group.reserve(0, max(own))
                self._groups[bound] = group

    def join(self, row: int, staged: StagedRow) -> None:
        """See `Batch.join`."""
        assert row not in self._home
        self._saved = None
        bound = self._bound(staged.length)
        group = self._groups.get(bound) or RowGroup(self._shapes, kernel=self._kernel)
        group.join(row, staged.length, group.staged_state(staged), staged)
        self._groups[bound] = group
        self._home[row] = bound

    def leave(self, row: int) -> None:
        """See `Batch.leave`."""
        self._saved = None
        bound = self._home.pop(row)
        group = self._groups[bound]
        group.leave(row)
        if group.count == 0:
            del self._groups[bound]
            self._split = None  # it holds the group's buffers

    def forward(self, tokens: mx.array) -> mx.array:
        """See `Batch.forward`."""
        count = tokens.shape[1]
        groups = self._active()
        logits = self._run(groups, tokens)
        if self._saved is not None:
            self._since.append(tokens)
        for group in groups:
            group.end(count)
        return logits

    def _run(self, groups: list[RowGroup], tokens: mx.array) -> mx.array:
        count = tokens.shape[1]
        if self._compiled is not None and count == 1 and self._compiled.takes(groups):
            logits = self._compiled.run(groups, tokens)
            if logits is not None:
                return logits
        if len(groups) == 1:
            groups[0].begin(count)
            return self._model(tokens, cache=groups[0].layers)
        if self._class_forward == "split":
            if self._split is None or not self._split.fits(groups):
                self._split = SplitLayers(groups)
            self._split.begin(count)
            return self._model(tokens, cache=self._split.layers)
        out, low = [], 0
        for group in groups:
            group.begin(count)
            out.append(self._model(tokens[low : low + len(group.rows)], cache=group.layers))
            low += len(group.rows)
        return mx.concatenate(out, axis=0)

    def checkpoint(self) -> None:
        """See `Batch.checkpoint`. A change of membership before the matching rewind makes it void."""
        self._since = []
        self._saved = {
            bound: [list(store.cache) for store in group.recurrent()] for bound, group in self._groups.items()
        }

    def rewind(self, counts: dict[int, int]) -> None:
        """See `Batch.rewind`. All or nothing: a ValueError or a fault of the model leaves every row as it was."""
        if not self._recurrent:
            self._rewind_groups(counts)
        elif any(counts.values()):
            self._replay(counts)
        self._saved = None
        self._since = []

    def _rewind_groups(self, counts: dict[int, int]) -> None:
        shares = [
            (group, {row: count for row, count in counts.items() if self._home[row] == bound})
            for bound, group in self._groups.items()
        ]
        for group, own in shares:
            group.check_rewind(own)
        for group, own in shares:
            group.rewind(own)

    def _replay(self, counts: dict[int, int]) -> None:
        """Go back to the checkpoint and feed the kept tokens again, one at a time.

        Recurrent state cannot be cut. Token by token is right for every kind (mamba v1 knows no mask for rows that
        stop earlier), and a checkpoint is only a few tokens old.
        """
        if self._saved is None:
            raise ValueError("recurrent rows need a checkpoint before tokens that may be taken back")
        total = sum(part.shape[1] for part in self._since)
        if max(counts.values()) > total:
            raise ValueError(f"only {total} tokens were fed since the checkpoint")
        rows = {bound: [row for row in group.rows if row is not None] for bound, group in self._groups.items()}
        for bound, group in self._groups.items():
            group.check_rewind(dict.fromkeys(rows[bound], total))
        before = [(group, group.snapshot(total)) for group in self._groups.values()]
        fed = mx.concatenate(self._since, axis=1)
        low = 0
        try:
            for bound in sorted(self._groups):
                group = self._groups[bound]
                part = fed[low : low + len(group.rows)]
                low += len(group.rows)
                self._replay_group(group, self._saved[bound], part, {row: counts.get(row, 0) for row in rows[bound]})
        except Exception:
            for group, old in before:
                group.roll_back(old)
            raise

    def _replay_group(
        self, group: RowGroup, saved: list[list[mx.array | None]], fed: mx.array, counts: dict[int, int]
    ) -> None:
        total = fed.shape[1]
        group.rewind(dict.fromkeys(counts, total))
        layers = group.recurrent()
        for store, states in zip(layers, saved, strict=True):
            store.adopt(list(states))
        for place in range(total):
            before = [list(store.cache) for store in layers]
            group.begin(1)
            self._model(fed[:, place : place + 1], cache=group.layers)
            group.end(1)
            ended = mx.array([row is None or place >= total - counts[row] for row in group.rows])
            for store, old in zip(layers, before, strict=True):
                store.adopt([_held(was, now, ended) for was, now in zip(old, store.cache, strict=True)])
        group.rewind(counts)

    def length(self, row: int) -> int:
        """See `Batch.length`."""
        group = self._groups[self._home[row]]
        return int(group.lengths[group.rows.index(row)])

    def export(self, row: int, low: int, high: int) -> StoredPage:
        """See `Batch.export`."""
        return owned(StoredPage(low, high, list(self._groups[self._home[row]].export(row, low, high))))

    def arrays(self) -> list[mx.array]:
        """See `Batch.arrays`."""
        return [array for group in self._groups.values() for array in group.arrays()]

    def recurrent_arrays(self) -> list[mx.array]:
        """See `Batch.recurrent_arrays`."""
        return [array for group in self._groups.values() for store in group.recurrent() for array in store.arrays()]

    def settle(self) -> None:
        """See `Batch.settle`."""
        for bound in sorted(self._groups):
            self._move_grown(bound)
        for bound in [bound for bound, group in self._groups.items() if group.count == 0]:
            del self._groups[bound]  # reserved for rows that did not come
        for group in self._groups.values():
            if group.shrink_if_sparse():
                self._saved = None

    def _move_grown(self, bound: int) -> None:
        group = self._groups[bound]
        if group.longest < bound or bound == self._bounds[-1]:
            return
        for row in [r for r, n in zip(group.rows, group.lengths, strict=True) if r is not None and n >= bound]:
            length, state = group.extract(row)
            target = self._bounds[self._bounds.index(bound) + 1]
            other = self._groups.get(target) or RowGroup(self._shapes, kernel=self._kernel)
            other.join(row, length, state)
            self._groups[target] = other
            self.leave(row)
            self._home[row] = target

    def check_integrity(self) -> None:
        """Raise AssertionError when rows and groups contradict each other."""
        found = {row: bound for bound, group in self._groups.items() for row in group.rows if row is not None}
        assert found == self._home, "a row is in no group, or in two"
        for group in self._groups.values():
            group.check_integrity()


def _held(was: mx.array | None, now: mx.array | None, ended: mx.array) -> mx.array | None:
    if now is None or was is None:
        return now
    return mx.where(ended.reshape(-1, *[1] * (now.ndim - 1)), was, now)
