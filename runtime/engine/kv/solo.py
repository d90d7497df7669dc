"""The row-by-row way, for models whose caches cannot share a batch: each row keeps mlx-lm's own caches.

Sampling, scheduling and everything after the forward still run for all rows at once, so no model is turned away.
Owned by the MLX thread.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..mlxlm import ChunkedKVCache
from .staged import StagedRow, leaf_caches

if TYPE_CHECKING:
    from .staged import Page


class SoloBatch:
    """Rows in caches of their own; the same protocol as RowBatch."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._rows: dict[int, StagedRow] = {}
        self._saved: dict[int, StagedRow] | None = None
        self._since: dict[int, list[mx.array]] = {}

    @property
    def order(self) -> list[int | None]:
        """See `Batch.order`."""
        return list(self._rows)

    def reserve(self, lengths: list[int]) -> None:
        """Nothing is shared, nothing to reserve."""

    def join(self, row: int, staged: StagedRow) -> None:
        """See `Batch.join`."""
        assert row not in self._rows
        self._saved = None
        self._rows[row] = _copied(staged)

    def leave(self, row: int) -> None:
        """See `Batch.leave`."""
        self._saved = None
        del self._rows[row]

    def forward(self, tokens: mx.array) -> mx.array:
        """See `Batch.forward`."""
        out = []
        for place, (number, row) in enumerate(self._rows.items()):
            part = tokens[place : place + 1]
            out.append(self._model(part, cache=row.caches))
            row.length += tokens.shape[1]
            if self._saved is not None:
                self._since[number].append(part)
        return mx.concatenate(out, axis=0)

    def checkpoint(self) -> None:
        """See `Batch.checkpoint`."""
        self._saved = {number: _copied(row) for number, row in self._rows.items()}
        self._since = {number: [] for number in self._rows}

    def rewind(self, counts: dict[int, int]) -> None:
        """See `Batch.rewind`: by trimming where the caches can, else from the checkpoint. All or nothing."""
        wanted = {number: count for number, count in counts.items() if count}
        for number, count in wanted.items():
            if not 0 < count <= self._rows[number].length:
                raise ValueError(f"cannot take back {count} of {self._rows[number].length} tokens")
        trimmed = {number: count for number, count in wanted.items() if _trims(self._rows[number], count)}
        replayed = {number: self._replayed(number, count) for number, count in wanted.items() if number not in trimmed}
        self._rows.update(replayed)
        for number, count in trimmed.items():
            for cache in leaf_caches(self._rows[number].caches):
                cache.trim(count)
            self._rows[number].length -= count
        self._saved = None
        self._since = {}

    def _replayed(self, number: int, count: int) -> StagedRow:
        """The row as of the checkpoint, fed again what it keeps."""
        if self._saved is None or number not in self._saved:
            raise ValueError("these caches cannot be trimmed: take a checkpoint before tokens that may be taken back")
        fed = mx.concatenate(self._since[number], axis=1)
        kept = fed.shape[1] - count
        if kept < 0:
            raise ValueError(f"only {fed.shape[1]} tokens were fed since the checkpoint")
        row = _copied(self._saved[number])
        for place in range(kept):
            self._model(fed[:, place : place + 1], cache=row.caches)
        row.length += kept
        return row

    def length(self, row: int) -> int:
        """See `Batch.length`."""
        return self._rows[row].length

    def export(self, row: int, index: int, page_tokens: int) -> Page:
        """See `Batch.export`."""
        return self._rows[row].page(index, page_tokens)

    def arrays(self) -> list[mx.array]:
        """See `Batch.arrays`."""
        return [array for row in self._rows.values() for array in row.arrays()]

    def recurrent_arrays(self) -> list[mx.array]:
        """All state: single caches are small beside the forward."""
        return self.arrays()

    def settle(self) -> None:
        """Nothing to compact."""

    def check_integrity(self) -> None:
        """Nothing shared, nothing to contradict."""


def _trims(row: StagedRow, count: int) -> bool:
    """Whether every cache can drop its newest tokens. One in chunks must still hold the chunk it goes back to."""
    return all(
        cache.is_trimmable() and (not isinstance(cache, ChunkedKVCache) or _holds_chunk(cache, cache.offset - count))
        for cache in leaf_caches(row.caches)
    )


def _holds_chunk(cache: Any, length: int) -> bool:
    return bool(cache.start_position <= length // cache.chunk_size * cache.chunk_size)


def _copied(row: StagedRow) -> StagedRow:
    """The same state in objects of its own: item assignment would change every holder of an array."""
    twin = copy.copy(row)
    twin.caches = [_copied_cache(cache) for cache in row.caches]
    return twin


def _copied_cache(cache: Any) -> Any:
    twin = copy.copy(cache)
    for name, value in vars(cache).items():
        if isinstance(value, mx.array):
            setattr(twin, name, mx.array(value))
        elif name == "caches":
            twin.caches = type(value)(_copied_cache(part) for part in value)
        elif name == "cache":
            twin.cache = [None if state is None else mx.array(state) for state in value]
    return twin
