"""The sampler of one engine: rows join and leave, and each step's logits become tokens in one lazy pass.

Invariants, each pinned by a test:
1. Nothing is evaluated here: tokens, log-probabilities and windows are lazy, and the host reads none of them. Only on
   MLX's CPU backend, where the device is the host, rows that draw are sampled by numpy; `waits` tells beforehand.
2. A row's tokens depend on its own logits, parameters, history and position alone: the same bits in any batch, slot
   and company.
3. Rows are grouped on the host once per change of membership; a step between changes builds no parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx
import numpy as np

from .draws import hash_seed
from .penalties import open_window
from .plan import Limits, Plan
from .rows import REWINDABLE_TOKENS, Row, window_width

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...sampling_params import SamplingParams
    from .logprobs import RowLogprobs

_CPU_SORT_LIMIT = 128
# Values in a block: the arrays of its operations stay in a core's cache (2-3 times as fast for 32 real vocabularies).
_CPU_BLOCK_VALUES = 1 << 18
_ENDLESS_ROWS = 1 << 30


class Sampled(NamedTuple):
    """One step's choice, lazy.

    Attributes:
        tokens: (B,) int32, all inside the vocabulary; those of dead slots mean nothing.
        logprobs: for the rows that asked; None when none did.
    """

    tokens: mx.array
    logprobs: RowLogprobs | None

    def arrays(self) -> list[mx.array]:
        """Every array here, to evaluate together."""
        if self.logprobs is None:
            return [self.tokens]
        found = (self.logprobs.chosen, self.logprobs.top_ids, self.logprobs.top_logprobs)
        return [self.tokens, *(array for array in found if array is not None)]


class RowSampler:
    """Samples for the rows of one engine; owned by its MLX thread, as is every array here."""

    def __init__(
        self,
        vocab_size: int,
        *,
        xtc_special: tuple[int, ...] = (),
        sort_width: int = 256,
        sort_limit: int | None = None,
        on_host: bool | None = None,
    ) -> None:
        """Make a sampler with no rows.

        Args:
            vocab_size: columns of the logits, at most 2**20.
            xtc_special: tokens that XTC never drops; mlx_lm.server passes the newline's and the ends of text.
            sort_width: rows with a top-k up to this are sampled among so many best tokens.
            sort_limit: where partitions give way to a sort when a threshold is sought. None chooses by device: small
                on the CPU, endless elsewhere, since MLX's GPU partition is itself a sort.
            on_host: whether rows that draw are sampled on the host (see `on_host`); None does so on the CPU backend.
        """
        if not 0 < vocab_size <= 1 << 20:
            raise ValueError(f"vocab_size must be in [1, 2**20], got {vocab_size}")
        on_cpu = mx.default_device() == mx.cpu
        if sort_limit is None:
            sort_limit = _CPU_SORT_LIMIT if on_cpu else vocab_size
        block_rows = max(1, _CPU_BLOCK_VALUES // vocab_size) if on_cpu else _ENDLESS_ROWS
        self._limits = Limits(
            vocab_size, sort_width, sort_limit, block_rows, _draws_on_host() if on_host is None else on_host
        )
        self._exempt = _token_mask(xtc_special, vocab_size)
        self._rows: dict[int, Row] = {}
        self._slots: tuple[int | None, ...] = ()
        self._plan: Plan | None = None

    def join(self, row: int, params: SamplingParams, history: Sequence[int], position: int) -> None:
        """Add a row.

        Args:
            row: its id, not in use.
            params: checked against the vocabulary already, with a seed; without one it counts as 0.
            history: prompt and output so far; only penalties look at it, and skip ids outside the vocabulary.
            position: index in the row's output of the token to be sampled next.
        """
        if row in self._rows:
            raise ValueError(f"row {row} has joined already")
        self._rows[row] = Row(params, hash_seed(params.seed or 0), position)
        self.resync(row, history, position)

    def leave(self, row: int) -> None:
        """Forget a row; KeyError when it is not there."""
        self._drop_plan()
        del self._rows[row]

    def waits(self, rows: Sequence[int | None]) -> bool:
        """Whether `sample` for these slots would wait for the logits, because it draws on the host."""
        return self._plan_for(tuple(rows)).waits

    def sample(self, logits: mx.array, rows: Sequence[int | None], *, allowed: mx.array | None = None) -> Sampled:
        """Choose a token for every slot and move the rows on by one.

        Args:
            logits: (B, V), of the last position, in batch order; any float type.
            rows: the row id in each slot, None for a dead one.
            allowed: (B, ceil(V / 32)) int32 or uint32, bit t % 32 of word t // 32 set where token t may be sampled;
                all ones for rows without a constraint. Applied before everything else.
        """
        if logits.shape != (len(rows), self._limits.vocab_size):
            raise ValueError(f"expected logits of shape {(len(rows), self._limits.vocab_size)}, got {logits.shape}")
        plan = self._plan_for(tuple(rows))
        edited = plan.edit(logits, allowed)
        tokens = plan.choose(edited, self._exempt)
        logprobs = plan.logprobs(edited, tokens)
        plan.advance(tokens)
        return Sampled(tokens, logprobs)

    def extra(self) -> list[mx.array]:
        """The token windows: evaluate them with each step's tokens, or their graphs grow."""
        windows = {id(row.window.tokens): row.window.tokens for row in self._rows.values() if row.window is not None}
        if self._plan is not None:
            windows.update({id(group.tokens): group.tokens for group in self._plan.penalties})
        return list(windows.values())

    def suppress_until(self, row: int, token_ids: Sequence[int], position: int) -> None:
        """Never sample `token_ids` for this row while its position is below `position`; replaces an earlier call.

        `min_tokens` is this with the stop ids. In a row whose mask allows nothing else, a suppressed token is sampled.
        """
        self._drop_plan()
        state = self._rows[row]
        state.held_back, state.held_back_until = tuple(token_ids), position

    def rewind(self, row: int, tokens: int) -> None:
        """Take back the row's newest tokens, sampled here and rejected: their draws will be made again.

        Raises ValueError for a penalised row that would lose more than `REWINDABLE_TOKENS`; use `resync` then.
        """
        state = self._rows[row]
        if not 0 <= tokens <= state.position:
            raise ValueError(f"cannot rewind row {row} by {tokens} tokens at position {state.position}")
        if state.params.penalised and tokens:
            missing = max(0, state.whole_at - state.position) + tokens
            if missing > REWINDABLE_TOKENS:
                raise ValueError(f"row {row}: {missing} tokens exceed what its window keeps; resync it")
            self._drop_plan()
            assert state.window is not None
            state.window = state.window.rewound(tokens)
            state.whole_at = state.position - tokens + missing
        state.position -= tokens
        if state.holding_back:
            self._drop_plan()

    def resync(self, row: int, history: Sequence[int], position: int) -> None:
        """Put a row at `position` with this history, whatever it sampled before; arguments as for `join`."""
        self._drop_plan()
        state = self._rows[row]
        state.position, state.whole_at = position, position
        if state.params.penalised:
            state.window = open_window(history, window_width(state.params), self._limits.vocab_size)

    def _plan_for(self, slots: tuple[int | None, ...]) -> Plan:
        if self._plan is None or slots != self._slots or self._plan.stale:
            self._drop_plan()
            self._plan, self._slots = self._build_plan(slots), slots
        return self._plan

    def _build_plan(self, slots: tuple[int | None, ...]) -> Plan:
        live = [slot for slot in slots if slot is not None]
        if len(set(live)) < len(live):
            raise ValueError(f"a row stands in more than one slot: {slots}")
        return Plan([None if slot is None else self._rows[slot] for slot in slots], self._limits)

    def _drop_plan(self) -> None:
        if self._plan is not None:
            self._plan.release()
            self._plan = None


def _draws_on_host() -> bool:
    """On MLX's CPU backend the device is the host."""
    return mx.default_device() == mx.cpu


def _token_mask(tokens: Sequence[int], vocab_size: int) -> mx.array | None:
    """(V,) bool, true at these tokens; None for none."""
    if not tokens:
        return None
    mask = np.zeros(vocab_size, dtype=np.bool_)
    mask[list(tokens)] = True
    return mx.array(mask)
