"""The thought before an answer: free text that a grammar must leave alone, of bounded length when asked.

Invariants:
- while the thought is open nothing is masked but the end of the output, so a constrained answer always follows;
- a thought that reaches its budget is closed by the model's own tokens, one after the other;
- before any token, a model that may think sees the grammar's tokens and the one that opens a thought.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher

    from ..constraint import Constraint


class ThoughtPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a row's thought runs.

    Attributes:
        is_open: the prompt has opened it.
        start: token ids that open a thought.
        end: token ids that close it.
        closing: what is written when the budget is used up; ends with `end`.
        budget: most tokens of thought; None is no bound.
    """

    is_open: bool
    start: tuple[int, ...]
    end: tuple[int, ...]
    closing: tuple[int, ...]
    budget: int | None = None


class ThoughtConstraint:
    """A thought, then perhaps a grammar. Used on the MLX thread alone.

    Args:
        plan: of the thought.
        inner: what the answer must match; None is anything.
        end: ids that end the output.
    """

    def __init__(self, plan: ThoughtPlan, inner: Constraint | None, end: frozenset[int]) -> None:
        self._plan = plan
        self._inner = inner
        self._end = end
        self._phase = "thought" if plan.is_open else "start"
        self._spent = 0
        self._recent: tuple[int, ...] = ()
        self._forced = plan.closing if plan.is_open and plan.budget == 0 else ()
        self._opening = 0

    @property
    def matcher(self) -> LLMatcher | None:
        """See `GrammarConstraint.matcher`; None while the thought has a say."""
        return getattr(self._inner, "matcher", None) if self._phase == "answer" else None

    def check(self) -> None:
        """See `GrammarConstraint.check`."""
        self._inner.check()  # type: ignore[union-attr]  # it has shown a matcher

    def fill(self, words: np.ndarray) -> None:
        """See `Constraint.fill`."""
        match self._phase:
            case "thought":
                self._fill_thought(words)
            case "start" if self._opening:
                _allow_only(words, self._plan.start[self._opening])
            case "start":
                self._fill_answer(words)
                _allow(words, self._plan.start[0])
            case _:
                self._fill_answer(words)

    def accept(self, token: int) -> None:
        """See `Constraint.accept`."""
        match self._phase:
            case "thought":
                self._accept_thought(token)
            case "start" if token == self._plan.start[self._opening]:
                self._opening += 1
                if self._opening == len(self._plan.start):
                    self._phase = "thought"
                    self._forced = self._plan.closing if self._plan.budget == 0 else ()
            case _:
                self._phase = "answer"
                if self._inner is not None:
                    self._inner.accept(token)

    def _fill_answer(self, words: np.ndarray) -> None:
        if self._inner is None:
            words[:] = 0xFFFFFFFF
        else:
            self._inner.fill(words)

    def _fill_thought(self, words: np.ndarray) -> None:
        if self._forced:
            _allow_only(words, self._forced[0])
            return
        words[:] = 0xFFFFFFFF
        for token in self._end:
            words[token // 32] &= ~(1 << token % 32) & 0xFFFFFFFF

    def _accept_thought(self, token: int) -> None:
        plan = self._plan
        self._spent += 1
        self._recent = (*self._recent, token)[-len(plan.end) :]
        if self._recent == plan.end:
            self._phase = "answer"
        elif self._forced:
            self._forced = self._forced[1:]
        elif plan.budget is not None and self._spent >= plan.budget:
            self._forced = plan.closing


def _allow(words: np.ndarray, token: int) -> None:
    words[token // 32] |= 1 << token % 32


def _allow_only(words: np.ndarray, token: int) -> None:
    words[:] = 0
    _allow(words, token)
