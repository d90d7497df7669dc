"""How dear chunks really are beside what the formula says: a moving average and the dearest seen. Owned by prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runtime.kv_estimate import GRAIN_TOKENS, chunk_within, room_for, transient_bytes, widened_bytes

if TYPE_CHECKING:
    from ..runtime.kv_estimate import KVLayout
    from .prefill_policy import Prompt

FIRST_RATIO = 2.0
TRUSTED_AFTER = 8
"""Chunks seen before FIRST_RATIO is forgotten."""
MEAN_MARGIN = 1.3
_SMOOTHING = 0.2
_LEAST_RATIO = 0.05
_FORGET = 0.999


class ChunkMemory:
    """Sizes chunks by memory.

    The room for the next chunk is what admission planned, until something was measured; rows may have outgrown the
    plan, and buffers of rows that ended linger. `begins_below` tells the engine up to what use the chunk may begin:
    between the choice of a chunk and its start rows grow and join.

    Args:
        layout: the model's.
        slack_bytes: from the line that is planned with to the one that must not be passed.
        line_bytes: what is planned with, in bytes as MLX counts.
        abort_bytes: what must not be passed, likewise.

    Attributes:
        line_bytes: as given at first; it moves with other programs.
        room_bytes: what the next chunk may take, its transient and what it leaves behind.
        dearest: largest ratio of measured to predicted bytes, slowly forgotten.
    """

    def __init__(self, layout: KVLayout, slack_bytes: int = 0, *, line_bytes: int = 0, abort_bytes: int = 0) -> None:
        self.room_bytes = 0
        self.line_bytes = line_bytes
        self._abort_bytes = abort_bytes
        self._slack_bytes = slack_bytes
        self.dearest = 0.0
        self._layout = layout
        self._mean = 0.0
        self._seen = 0

    @property
    def ratio(self) -> float:
        """What predictions are multiplied with."""
        learnt = max(MEAN_MARGIN * self._mean, self.dearest, _LEAST_RATIO)
        return learnt if self._seen >= TRUSTED_AFTER else max(FIRST_RATIO, learnt)

    def used(self, active_bytes: int) -> None:
        """So much is in use now; 0 is not known."""
        if active_bytes:
            self.room_bytes = self.line_bytes - active_bytes

    def tokens_within(self, depth: int, widened: int = 0) -> int:
        """Most tokens of a chunk at `depth` whose row's caches grow by `widened` bytes besides; may be 0.

        What was learnt may be luck: a chunk FIRST_RATIO times as dear as the formula says must still stay in the slack.
        """
        room = self.room_bytes - widened
        learnt = room / self.ratio
        luckless = (room + self._slack_bytes) / FIRST_RATIO
        return chunk_within(self._layout, min(learnt, luckless), depth)

    def begins_below(self, tokens: int, depth: int, widened: int, *, smallest: bool) -> int:
        """Most that may be in use where such a chunk begins: the inverse of `tokens_within`.

        One that cannot be smaller need not wait until other programs leave more: it has to stay below the stable line.
        """
        needed = transient_bytes(self._layout, tokens, depth) + tokens * self._layout.token_bytes
        if smallest:
            return self._abort_bytes - widened - int(max(FIRST_RATIO, self.ratio) * needed)
        spare = min(-self.ratio * needed, self._slack_bytes - FIRST_RATIO * needed)
        return self.line_bytes - widened + int(spare)

    def widened_bytes(self, prompt: Prompt) -> int:
        """What the caches of a prompt grow by when its next chunk begins, beside that chunk's own tokens."""
        held = prompt.staged_room
        first = not held and not prompt.restore
        room = GRAIN_TOKENS if first else room_for(prompt.target)
        return widened_bytes(self._layout, held, room)

    def observe(self, tokens: int, depth: int, measured_bytes: int) -> None:
        """Learn from a chunk that ran."""
        predicted = transient_bytes(self._layout, tokens, depth)
        if predicted <= 0 or measured_bytes <= 0:
            return
        ratio = measured_bytes / predicted
        self._mean += (ratio - self._mean) * (_SMOOTHING if self._seen else 1.0)
        self.dearest = max(ratio, self.dearest * _FORGET)
        self._seen += 1
