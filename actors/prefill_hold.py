"""A prompt whose smallest chunk finds too little memory, since rows have outgrown what was planned with them.

It waits, and is tried again after each HELD_STEP_S of decode steps: rows end, and buffers that they leave shrink. The
prefix cache is asked for what is lacking at once; after HELD_S running rows are put back, the youngest first, one each
HELD_S, so that the wait ends. When nobody decodes it is not held: admission has kept room for a smallest chunk then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runtime.messages.cache_store import Reclaim
from ..runtime.messages.decode import Preempt

if TYPE_CHECKING:
    from ..runtime.messages.cache_store import CacheStoreMessage
    from ..runtime.messages.decode import DecodeMessage

HELD_STEP_S = 0.05
HELD_S = 5.0


class ChunkHold:
    """Owned by the prefill core.

    Attributes:
        held: whether a smallest chunk found too little memory when last tried.
        crowded: chunks that found too little memory, of any size.
    """

    def __init__(self) -> None:
        self.held = False
        self.crowded = 0
        self._leader = 0
        self._since_s = 0.0

    def lacks(self, leader: int, bytes_: int, now_s: float) -> tuple[list[CacheStoreMessage], list[DecodeMessage]]:
        """The smallest chunk of `leader` lacks so many bytes: what the cache-store and decode are to be told."""
        if not self.held or leader != self._leader:
            self.held, self._leader, self._since_s = True, leader, now_s
            return [Reclaim(bytes_)], []
        if now_s - self._since_s < HELD_S:
            return [], []
        self._since_s = now_s
        reason = f"a prompt has waited {HELD_S:.0f} s for {-(-bytes_ // (1 << 20))} MiB"
        return [Reclaim(bytes_)], [Preempt(reason, last=True)]
