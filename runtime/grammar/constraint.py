"""A row's grammar while it decodes. Implements `runtime.constraint.Constraint`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .compiler import GOOD_REASONS, first_line
from .spec import GrammarFailed

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher


class GrammarConstraint:
    """Masks by one matcher. Made on a grammar thread, then used on the MLX thread alone.

    Args:
        matcher: at its start, this row's own.
        end: ids that end the output; allowed by the mask wherever the text may end.
    """

    __slots__ = ("_end", "_ended", "_matcher")

    def __init__(self, matcher: LLMatcher, end: frozenset[int]) -> None:
        self._matcher = matcher
        self._end = end
        self._ended = False

    @property
    def matcher(self) -> LLMatcher:
        """Whose mask is this row's; whoever computes it from here calls `check` after."""
        return self._matcher

    def fill(self, words: np.ndarray) -> None:
        """See `Constraint.fill`. Raises GrammarFailed when the grammar cannot go on."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self.check()

    def check(self) -> None:
        """Raise GrammarFailed when the grammar cannot go on; called after its mask was computed."""
        matcher = self._matcher
        # A broken matcher allows an end token, as if its text were whole.
        if matcher.is_error():
            raise GrammarFailed(f"the grammar failed: {first_line(matcher.get_error())}")
        if matcher.is_stopped() and matcher.stop_reason() not in GOOD_REASONS:
            raise GrammarFailed(f"the grammar failed: {matcher.stop_reason()}")

    def accept(self, token: int) -> None:
        """See `Constraint.accept`. Raises GrammarFailed for a token that the mask did not allow."""
        if self._ended:  # the row is in flight once more after its end
            return
        if token in self._end and self._matcher.is_accepting():
            self._ended = True
            return
        if not self._matcher.consume_token(token):
            raise GrammarFailed(f"the grammar failed: {first_line(self._matcher.get_error())}")
