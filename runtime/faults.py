"""Faults of a forward: whose doing they are, and who is tried again.

- "row": the row's own (its grammar, its join). It fails.
- "state": the row's KV is bad (its logits are not numbers, its chunk raised). It is computed anew, without the cache.
- "step": a forward over many rows raised, and nobody knows which one it was. All are computed anew.
- "memory": the device had no room. As "step"; when it is final the client hears that it may try again later.

A row that was in MAX_SHARED_FAULTS failed forwards runs alone from then on, so the next one is its own doing:
whatever a poisonous request does, its neighbours end as they should.
"""

from __future__ import annotations

from typing import Literal

from .errors import EngineFailed, Overloaded, TroupeError

Fault = Literal["row", "state", "step", "memory"]

MAX_SHARED_FAULTS = 2
"""After so many failed forwards a row is tried alone."""
MAX_OWN_FAULTS = 1
"""Failed forwards that are surely a row's own doing, after which it is tried once more."""
MEMORY_RETRY_AFTER_S = 5.0

_OUT_OF_MEMORY = ("out of memory", "unable to allocate", "attempting to allocate", "bad_alloc", "malloc")


def retries(fault: Fault, faults: int, *, alone: bool) -> bool:
    """Whether a row is tried again.

    Args:
        fault: what happened now.
        faults: how often a forward with this row has failed, this time included.
        alone: nobody else was in that forward.
    """
    if fault == "row":
        return False
    own = alone or fault == "state"
    return faults <= (MAX_OWN_FAULTS if own else MAX_SHARED_FAULTS)


def must_run_alone(faults: int) -> bool:
    """Whether a row may no longer share forwards."""
    return faults >= MAX_SHARED_FAULTS


def final_error(fault: Fault, text: str, code: str | None = None) -> TroupeError:
    """What a client hears when a row is not tried again; `code` is the error's own."""
    if fault == "memory":
        return Overloaded(
            f"the device ran out of memory ({text}); send less context or try later",
            retry_after_s=MEMORY_RETRY_AFTER_S,
            code="out_of_memory",
        )
    return EngineFailed(text, code=code)


def fault_of(error: BaseException, otherwise: Fault) -> Fault:
    """ "memory" when the exception says so. MLX has no type of its own for it, only RuntimeErrors with a text."""
    if isinstance(error, MemoryError):
        return "memory"
    text = str(error).lower()
    if isinstance(error, RuntimeError) and any(part in text for part in _OUT_OF_MEMORY):
        return "memory"
    return otherwise
