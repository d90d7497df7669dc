"""How dear chunks really are beside what the formula says: a moving average and the dearest seen. Owned by prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runtime.kv_estimate import chunk_within, transient_bytes

if TYPE_CHECKING:
    from ..runtime.kv_estimate import KVLayout

FIRST_RATIO = 2.0
TRUSTED_AFTER = 8
"""Chunks seen before FIRST_RATIO is forgotten."""
MEAN_MARGIN = 1.3
_SMOOTHING = 0.2
_LEAST_RATIO = 0.05
_FORGET = 0.999


class ChunkMemory:
    """Sizes chunks by memory.

    Args:
        layout: the model's.
        slack_bytes: from the line that is planned with to the one that must not be passed.

    Attributes:
        room_bytes: what the transient of the next chunk may take; admission says so with each admission.
        dearest: largest ratio of measured to predicted bytes, slowly forgotten.
    """

    def __init__(self, layout: KVLayout, slack_bytes: int = 0) -> None:
        self.room_bytes = 0
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

    def tokens_within(self, depth: int) -> int:
        """Most tokens of a chunk at `depth`; may be 0.

        What was learnt may be luck: a chunk FIRST_RATIO times as dear as the formula says must still stay in the slack.
        """
        learnt = self.room_bytes / self.ratio
        luckless = (self.room_bytes + self._slack_bytes) / FIRST_RATIO
        return chunk_within(self._layout, min(learnt, luckless), depth)

    def observe(self, tokens: int, depth: int, measured_bytes: int) -> None:
        """Learn from a chunk that ran."""
        predicted = transient_bytes(self._layout, tokens, depth)
        if predicted <= 0 or measured_bytes <= 0:
            return
        ratio = measured_bytes / predicted
        self._mean += (ratio - self._mean) * (_SMOOTHING if self._seen else 1.0)
        self.dearest = max(ratio, self.dearest * _FORGET)
        self._seen += 1
