"""What the sampler knows of one row between steps: plain data, owned by the MLX thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...sampling_params import SamplingParams
    from .penalties import TokenWindow

REWINDABLE_TOKENS = 32
"""Windows hold so many tokens more than they need: how far a penalised row can be rewound."""
_WINDOW_WIDTHS = (64, 512, 4096 + REWINDABLE_TOKENS)


@dataclass(slots=True)
class Row:
    """One running row.

    Attributes:
        params: how it samples.
        seed_hash: start of its random stream.
        position: index of the next token in its output.
        window: its recent tokens while it is in no penalty group; None unless penalised.
        whole_at: position at which a rewound window again holds all the tokens it can.
        held_back: tokens suppressed while position < `held_back_until`.
        held_back_until: see above.
    """

    params: SamplingParams
    seed_hash: int
    position: int
    window: TokenWindow | None = None
    whole_at: int = 0
    held_back: tuple[int, ...] = ()
    held_back_until: int = 0

    @property
    def holding_back(self) -> bool:
        """True while `held_back` must not be sampled."""
        return bool(self.held_back) and self.position < self.held_back_until


def window_width(params: SamplingParams) -> int:
    """Columns of a penalised row's window; few sizes, so that rows share arrays."""
    spans = (
        (params.repetition_penalty != 1.0, params.repetition_window),
        (params.presence_penalty != 0.0, params.presence_window),
        (params.frequency_penalty != 0.0, params.frequency_window),
    )
    needed = max(span for used, span in spans if used) + REWINDABLE_TOKENS
    return next((width for width in _WINDOW_WIDTHS if width >= needed), needed)
