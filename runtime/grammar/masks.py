"""The masks of a step's rows, side by side where there are cores to spare.

A mask over 152,000 tokens takes a quarter of a millisecond, so 32 rows one after the other would outlast the forward
that hides them. llguidance computes those of its matchers on threads of its own; all other constraints fill in turn.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from llguidance import LLMatcher

    from ..constraint import Constraint

logger = logging.getLogger(__name__)

MOST_THREADS = 8


class MaskFiller:
    """Owned by the MLX thread, which waits for the masks.

    Args:
        threads: how many compute masks; None leaves the machine a core and takes at most MOST_THREADS.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = min(MOST_THREADS, (os.cpu_count() or 1) - 1) if threads is None else threads
        self._executor: Any = None

    def fill(self, constraints: Sequence[Constraint], words: np.ndarray) -> list[Exception | None]:
        """Fill a row of `words` for each constraint; returns what went wrong with each.

        Args:
            words: zeros, uint32 (constraints, ceil(vocab / 32)), C-contiguous.
        """
        matchers = [(getattr(constraint, "matcher", None), place) for place, constraint in enumerate(constraints)]
        together = [(matcher, place) for matcher, place in matchers if matcher is not None]
        done = {place for _, place in together} if self._computed(together, words) else set()
        errors: list[Exception | None] = []
        for place, constraint in enumerate(constraints):
            try:
                if place in done:
                    constraint.check()  # type: ignore[attr-defined]  # those that show a matcher have it
                else:
                    constraint.fill(words[place])
            except Exception as error:
                errors.append(error)
            else:
                errors.append(None)
        return errors

    def _computed(self, matchers: list[tuple[LLMatcher, int]], words: np.ndarray) -> bool:
        """Whether all these masks could be computed side by side."""
        if self._threads < 2 or len(matchers) < 2:
            return False
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._threads)
        try:
            self._executor.unsafe_compute_mask_ptr(matchers, words.ctypes.data, words.strides[0], len(words))
        except Exception:
            logger.exception("%d masks could not be computed side by side", len(matchers))
            words[[place for _, place in matchers]] = 0
            return False
        return True
