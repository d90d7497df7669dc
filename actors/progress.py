"""Notices that requests wait and nothing moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runtime.step_watch import StepWatch

if TYPE_CHECKING:
    from ..runtime.clock import Clock
    from .casting import Cast


class Progress:
    """Notices when requests are alive and nothing is done for them: a lost message, or a fault nobody foresaw.

    A step that hangs is not its business: the engine's thread is at work then.

    Args:
        cast: whose work is watched.
        limit_s: longest that nothing may happen.
        interval_s: time between two looks.
    """

    def __init__(self, cast: Cast, limit_s: float, interval_s: float, clock: Clock) -> None:
        self._cast = cast
        self._clock = clock
        self._interval_s = interval_s
        self._watch = StepWatch(limit_s, interval_s)
        self._done: tuple[int, ...] = ()
        self._moved_s = clock.now()

    def ended_s(self) -> float | None:
        """How long ago it came to an end; None when all is well. To be asked every `interval_s`."""
        cast, now_s = self._cast, self._clock.now()
        admission = cast.admission.core
        done = (
            cast.decode.core.steps,
            cast.prefill.core.prompt_tokens,
            sum(admission.finished.values()),
            admission.requeued,
            cast.cache_store.core.restore.restored,
        )
        at_work = (cast.executor.last_step_age_s or 0.0) > self._interval_s
        if admission.idle or at_work or done != self._done:
            self._done, self._moved_s = done, now_s
        still_s = now_s - self._moved_s
        return still_s if self._watch.overdue(now_s, still_s) else None
