"""The host's side of a step: rows grouped by need, built once and kept until membership changes."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx
import numpy as np

from .draws import UNIFORM_BITS, draw
from .edits import Biases, apply_mask, build_biases
from .filters import Columns, Share, Xtc, all_masses, ranked_masses
from .logprobs import RowLogprobs, row_logprobs
from .mass import ENDLESS, pick, to_fixed
from .on_host import host_columns, sample_on_host
from .penalties import PenaltyGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ...sampling_params import SamplingParams
    from .rows import Row

_NEVER = 1 << UNIFORM_BITS
_COLDEST = 1e-30
_NARROW = 64
_SMALL_VOCABULARY = 1024
_SORTED_VALUES = 4096  # so many, over all rows, sort as fast as halving takes to start


class Limits(NamedTuple):
    """Sizes that choose between methods; the results are exact whatever they are.

    Attributes:
        vocab_size: columns of the logits.
        sort_width: rows with a top-k up to this are sampled among that many best tokens.
        sort_limit: see `mass.cut`.
        block_rows: most rows worked on at once.
        on_host: whether rows that draw are sampled on the host, which waits for their logits.
    """

    vocab_size: int
    sort_width: int
    sort_limit: int
    block_rows: int
    on_host: bool = False


class Method(Enum):
    """How a row's token is chosen."""

    GREEDY = "greedy"
    RANKED = "ranked"
    ALL = "all"


class Need(NamedTuple):
    """What decides a row's group; it depends on the row's own parameters alone, so neighbours change no result.

    Attributes:
        method: see there.
        width: of `ranked_masses`.
        steps: the filters the row pays for, so that rows without one do not. Small vocabularies leave it empty: there
            the number of operations counts, not their size, and a step changes nothing for rows that do not ask for it.
    """

    method: Method
    width: int = 0
    steps: tuple[bool, ...] = ()


def need_of(params: SamplingParams, limits: Limits) -> Need:
    """The group of a row with these parameters."""
    if params.greedy:
        return Need(Method.GREEDY)
    top_p = params.top_p < 1.0
    top_k = 0 < params.top_k < limits.vocab_size
    xtc = params.xtc_probability > 0.0
    small = limits.vocab_size <= _SMALL_VOCABULARY
    if top_k and not xtc and params.top_k <= limits.sort_width:
        width = _NARROW if params.top_k <= _NARROW else limits.sort_width
        return Need(Method.RANKED, width, steps=() if small else (top_p,))
    return Need(Method.ALL, steps=() if small else (top_p, top_k, xtc))


class Group:
    """Rows of one need, with their parameters on the device."""

    def __init__(self, need: Need, members: Sequence[tuple[int, Row]], batch: int, limits: Limits) -> None:
        """`members` are (slot, row) pairs, `batch` the number of slots."""
        self.need = need
        self.slots = [slot for slot, _ in members]
        self.rows = [row for _, row in members]
        self._take = taker(self.slots, batch)
        self._sort_limit = max(limits.sort_limit, _SORTED_VALUES // len(members))
        params = [row.params for row in self.rows]
        self._on_host = host_columns(params, limits.vocab_size) if limits.on_host else None
        self._columns = build_columns(params, limits.vocab_size)

    def sample_on_host(
        self,
        logits: NDArray[np.float32],
        picks: NDArray[np.int64],
        luck: NDArray[np.int32],
        exempt: NDArray[np.bool_] | None,
    ) -> NDArray[np.int32]:
        """Choose the rows' tokens from the whole batch's logits, (B, V) on the host; arguments as for `sample`."""
        own = logits if len(self.slots) == len(logits) else logits[self.slots]
        if self.need.method is Method.GREEDY or self._on_host is None:
            return own.argmax(axis=-1).astype(np.int32)
        return sample_on_host(own, self._on_host, picks, luck, exempt)

    def sample(
        self, logits: mx.array, picks: NDArray[np.int64], luck: NDArray[np.int32], exempt: mx.array | None
    ) -> mx.array:
        """Choose the rows' tokens, (rows,) int32.

        Args:
            logits: (B, V), the whole batch.
            picks: (rows, 1) on the host, uniforms for the token.
            luck: (rows,) on the host, for XTC.
            exempt: (V,) bool, tokens XTC never drops.
        """
        logits = self._take(logits)
        if self.need.method is Method.GREEDY:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        logits = logits.astype(mx.float32)
        uniforms = mx.array(picks)
        if self.need.method is Method.ALL:
            masses = all_masses(logits, self._columns, self._xtc(luck, exempt), self._sort_limit)
            return pick(masses, uniforms)
        ids, masses = ranked_masses(logits, self._columns, self.need.width)
        return mx.take_along_axis(ids, pick(masses, uniforms)[:, None], axis=-1)[:, 0].astype(mx.int32)

    def _xtc(self, luck: NDArray[np.int32], exempt: mx.array | None) -> Xtc | None:
        """This step's thresholds; None when XTC leaves every row alone."""
        params = [row.params for row in self.rows]
        struck = [word < p.xtc_probability * _NEVER for word, p in zip(luck.tolist(), params, strict=True)]
        if not any(struck):
            return None
        thresholds = [to_fixed(p.xtc_threshold) if hit else _NEVER for p, hit in zip(params, struck, strict=True)]
        return Xtc(_column(thresholds, mx.int64), exempt)


class Plan:
    """One batch's groups, edits and places, good for step after step.

    A plan holds the penalised rows' token windows; `release` gives them back before another plan is built.
    """

    def __init__(self, slots: Sequence[Row | None], limits: Limits) -> None:
        """`slots` in batch order, None for dead ones."""
        batch = len(slots)
        members = [(slot, row) for slot, row in enumerate(slots) if row is not None]
        self.rows = [row for _, row in members]
        self.holding = [row for row in self.rows if row.holding_back]
        self._groups = _group(members, batch, limits)
        self._drawing = [row for group in self._groups if not _is_greedy(group) for row in group.rows]
        self._hashes = [row.seed_hash for row in self._drawing]
        self._block_rows = limits.block_rows
        self._on_host = limits.on_host
        self._striking = any(row.params.xtc_probability > 0 for row in self._drawing)
        self._order = _order([slot for group in self._groups for slot in group.slots], batch)
        self._biases: Biases | None = build_biases(self.rows, [slot for slot, _ in members], limits.vocab_size)
        self.penalties = _build_penalty_groups(members, limits.vocab_size)
        asking = [(slot, row.params.top_logprobs) for slot, row in members if row.params.top_logprobs is not None]
        self._asking = tuple(slot for slot, _ in asking)
        self._top_counts = tuple(count or 0 for _, count in asking)
        self._take_asking = taker(self._asking, batch)

    @property
    def waits(self) -> bool:
        """Whether `choose` reads the logits, and so waits for the forward."""
        return self._on_host and bool(self._drawing)

    @property
    def stale(self) -> bool:
        """True once a row may sample tokens that the plan suppresses."""
        return any(not row.holding_back for row in self.holding)

    def edit(self, logits: mx.array, allowed: mx.array | None) -> mx.array:
        """Apply biases, penalties and the mask; (B, V), float32 if anything was changed."""
        if self._biases is not None or self.penalties:
            flat = logits.astype(mx.float32).reshape(-1)
            if self._biases is not None:
                flat = self._biases.apply(flat)
            for group in self.penalties:
                flat = group.apply(flat)
            logits = flat.reshape(logits.shape)
        return logits if allowed is None else apply_mask(logits.astype(mx.float32), allowed)

    def choose(self, logits: mx.array, exempt: mx.array | None) -> mx.array:
        """Choose every slot's token from edited logits; (B,) int32. A dead slot repeats another's token, or 0."""
        if not self._groups:
            return mx.zeros((logits.shape[0],), dtype=mx.int32)
        picks, luck = draw(self._hashes, [row.position for row in self._drawing])
        uniforms = picks[:, None].astype(np.int64)
        if self.waits:
            return self._choose_on_host(logits, uniforms, luck, exempt)
        parts, start = [], 0
        for group in self._groups:
            end = start if _is_greedy(group) else start + len(group.rows)
            parts.append(group.sample(logits, uniforms[start:end], luck[start:end], exempt))
            start = end
        tokens = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return tokens if self._order is None else mx.take(tokens, self._order)

    def _choose_on_host(
        self, logits: mx.array, uniforms: NDArray[np.int64], luck: NDArray[np.int32], exempt: mx.array | None
    ) -> mx.array:
        values = np.array(logits.astype(mx.float32))
        spared = np.array(exempt) if exempt is not None and self._striking else None
        tokens = np.zeros(len(values), np.int32)
        start = 0
        for group in self._groups:
            end = start if _is_greedy(group) else start + len(group.rows)
            tokens[group.slots] = group.sample_on_host(values, uniforms[start:end], luck[start:end], spared)
            start = end
        return mx.array(tokens)

    def logprobs(self, logits: mx.array, tokens: mx.array) -> RowLogprobs | None:
        """Log-probabilities under edited logits for the rows that ask; None when none does."""
        if not self._asking:
            return None
        asked = self._take_asking(logits).astype(mx.float32)
        return row_logprobs(asked, self._take_asking(tokens), self._asking, self._top_counts, self._block_rows)

    def advance(self, tokens: mx.array) -> None:
        """Move every row past the tokens just chosen."""
        for row in self.rows:
            row.position += 1
        for group in self.penalties:
            group.append(tokens)

    def release(self) -> None:
        """Give the rows their token windows back; the plan is not used afterwards."""
        for group in self.penalties:
            group.release()


def taker(slots: Sequence[int], batch: int) -> Callable[[mx.array], mx.array]:
    """A function that takes these slots out of a batch: nothing to do, a slice, or a gather."""
    if not slots:
        return lambda array: array[:0]
    first, count = slots[0], len(slots)
    if list(slots) == list(range(first, first + count)):
        return (lambda array: array) if count == batch else (lambda array: array[first : first + count])
    index = mx.array(list(slots), dtype=mx.int32)
    return lambda array: mx.take(array, index, axis=0)


def _is_greedy(group: Group) -> bool:
    return group.need.method is Method.GREEDY


def _group(members: Sequence[tuple[int, Row]], batch: int, limits: Limits) -> list[Group]:
    """Split rows by need, in order of first appearance, and large groups into blocks."""
    by_need: dict[Need, list[tuple[int, Row]]] = {}
    for slot, row in members:
        by_need.setdefault(need_of(row.params, limits), []).append((slot, row))
    groups = []
    for need, found in by_need.items():
        size = len(found) if need.method is Method.GREEDY or limits.on_host else limits.block_rows
        groups += [Group(need, found[i : i + size], batch, limits) for i in range(0, len(found), size)]
    return groups


def _build_penalty_groups(members: Sequence[tuple[int, Row]], vocab_size: int) -> list[PenaltyGroup]:
    """Split penalised rows by the width of their windows."""
    by_width: dict[int, list[tuple[int, Row]]] = {}
    for slot, row in members:
        if row.window is not None:
            by_width.setdefault(row.window.tokens.shape[-1], []).append((slot, row))
    return [
        PenaltyGroup([row for _, row in found], [slot for slot, _ in found], vocab_size) for found in by_width.values()
    ]


def _order(grouped: Sequence[int], batch: int) -> mx.array | None:
    """For every slot its place in the groups' tokens end to end, 0 for a dead slot; None when that changes nothing."""
    if list(grouped) == list(range(batch)):
        return None
    order = np.zeros(batch, dtype=np.int32)
    order[list(grouped)] = np.arange(len(grouped))
    return mx.array(order)


def build_columns(params: Sequence[SamplingParams], vocab_size: int) -> Columns:
    """The parameters of a group's rows on the device."""
    ceilings = [-math.log(p.min_p) if p.min_p > 0.0 else math.inf for p in params]
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size + 1 for p in params]
    top_p = None
    if any(p.top_p < 1.0 for p in params):
        fixed = _column([max(to_fixed(p.top_p), 1) for p in params], mx.int64)
        top_p = Share(fixed, _column([0 if p.top_p < 1.0 else ENDLESS for p in params], mx.int64))
    return Columns(
        coldness=_column([1.0 / max(p.temperature, _COLDEST) for p in params], mx.float32),
        top_p=top_p,
        ceiling=_column(ceilings, mx.float32) if any(map(math.isfinite, ceilings)) else None,
        top_k=_column(top_k, mx.int64) if min(top_k) < vocab_size else None,
    )


def _column(values: Sequence[float], dtype: mx.Dtype) -> mx.array:
    return mx.array([[value] for value in values], dtype=dtype)
