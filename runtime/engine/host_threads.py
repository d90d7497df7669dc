"""How many threads the products of a CPU engine use: measured once, on a step of many rows.

Threads that a step gains little from are better left to the event loop, which streams the tokens meanwhile.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..models.blas import most_threads, set_threads
from .mlxlm import make_prompt_cache

if TYPE_CHECKING:
    from ..clock import Clock

logger = logging.getLogger(__name__)

ROWS = 32
ENOUGH_S = 0.25
"""A step that takes this long is bound by its products: it gets all threads without another try."""
GAIN = 1.15
"""More threads must make the step so many times as fast."""
TRIES = 5


_asked = 1
"""The number is the process's: of several models the one that asks for most decides."""


def choose_threads(model: Any, clock: Clock) -> int | None:
    """Let BLAS use one thread where all of them are hardly faster. Returns the number; None when it is not ours."""
    global _asked
    most = most_threads()
    if most is None or _asked >= most:
        return most
    set_threads(most)
    many_s = _step_s(model, clock)
    one_s = float("inf")
    if many_s < ENOUGH_S:
        set_threads(1)
        one_s = _step_s(model, clock)
    _asked = most if many_s * GAIN < one_s else 1
    set_threads(_asked)
    logger.info(
        "BLAS threads: %d of %d (a step of %d rows takes %.1f ms with one, %.1f ms with all)",
        _asked,
        most,
        ROWS,
        one_s * 1e3,
        many_s * 1e3,
    )
    return _asked


def _step_s(model: Any, clock: Clock) -> float:
    """Seconds of one decode step: the best of a few, without the first; a long one is not repeated."""
    best_s = float("inf")
    for turn in range(TRIES + 1):
        began_s = clock.now()
        mx.eval(model(mx.zeros((ROWS, 1), dtype=mx.int32), cache=make_prompt_cache(model)))
        took_s = clock.now() - began_s
        if turn or took_s >= 2 * ENOUGH_S:
            best_s = min(best_s, took_s)
        if best_s >= ENOUGH_S and turn:
            break
    return best_s
