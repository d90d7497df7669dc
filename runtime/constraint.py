"""What a grammar must offer so that its row runs in the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np


class Constraint(Protocol):
    """Host-side state of one constrained row, used on the MLX thread only, in step order.

    The step's forward runs on the device while `fill` computes the mask; only the sample waits for it.
    """

    def fill(self, words: np.ndarray) -> None:
        """Write the tokens allowed next into uint32 (ceil(vocab / 32),): bit t % 32 of word t // 32 is token t.

        At least one token must be allowed. An exception ends this row alone.
        """
        ...

    def accept(self, token: int) -> None:
        """The row's token was read; called before the next `fill`. An exception ends this row alone."""
        ...
