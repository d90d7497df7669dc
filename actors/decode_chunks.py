"""Decode's side of prefill: the offered chunks, the debt to running rows, and whose KV is staged on the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runtime.messages.prefill import ChunkDone

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..runtime.messages.decode import ChunkOutcome, Offer
    from ..runtime.messages.executor import Chunk

_SMOOTHING = 0.2


class ChunkDesk:
    """Owned by the decode core.

    Attributes:
        waiting_for_prefill: prefill was told of chunks and has not answered; its answer is microseconds away and may
            change the next plan, so decode waits for it.
    """

    def __init__(self) -> None:
        self.waiting_for_prefill = False
        self._offer: Offer | None = None
        self._staged: set[int] = set()
        self._discards: list[int] = []
        self._decoded_s = 0.0
        self._step_s = 0.0

    @property
    def busy(self) -> bool:
        """True while anything is offered, staged, to be freed, or awaited."""
        return bool(self._offer or self._staged or self._discards or self.waiting_for_prefill)

    def offer(self, offer: Offer) -> tuple[ChunkDone, ...]:
        """Take prefill's answer; returns the chunks that it replaces."""
        self.waiting_for_prefill = False
        if not offer.chunks:
            return ()
        replaced, self._offer = self._offer, offer
        return () if replaced is None else _dropped(replaced.chunks)

    def withdraw(self, leaders: Iterable[int]) -> tuple[ChunkDone, ...]:
        """Forget rows whose prefill ended early; returns their chunks that were not planned."""
        gone = set(leaders)
        for leader in gone:
            self.discard(leader)
        offer = self._offer
        if offer is None:
            return ()
        kept = tuple(chunk for chunk in offer.chunks if chunk.row not in gone)
        self._offer = type(offer)(kept, offer.after_decode_s) if kept else None
        return _dropped(tuple(chunk for chunk in offer.chunks if chunk.row in gone))

    def discard(self, leader: int) -> None:
        """Free a leader's staged KV with the next plan, if there is any."""
        if leader in self._staged:
            self._staged.remove(leader)
            self._discards.append(leader)

    def take_discards(self) -> tuple[int, ...]:
        """Staged KV that the plan being built frees."""
        discards = tuple(self._discards)
        self._discards.clear()
        return discards

    def take_due(self, *, decoding: bool, steps_ahead: int) -> Offer | None:
        """The offer, if the plan being built may run its chunks.

        Args:
            decoding: whether the plan has rows that decode.
            steps_ahead: decode steps that end before the chunks begin and are not measured yet.
        """
        offer = self._offer
        if offer is None or (decoding and self._decoded_s + steps_ahead * self._step_s < offer.after_decode_s):
            return None
        self._offer = None
        self._staged.update(chunk.row for chunk in offer.chunks)
        return offer

    def stepped(self, seconds: float) -> None:
        """A decode step took so long."""
        self._decoded_s += seconds
        self._step_s += (seconds - self._step_s) * (_SMOOTHING if self._step_s else 1.0)

    def ran(self, chunks: tuple[Chunk, ...], outcomes: tuple[ChunkOutcome, ...]) -> tuple[ChunkDone, ...]:
        """Planned chunks have run: what prefill is to hear. The debt to running rows starts anew."""
        self._decoded_s = 0.0
        return tuple(
            ChunkDone(
                chunk.row,
                0 if outcome.error is not None or outcome.restore_missed or outcome.crowded else len(chunk.tokens),
                chunk.start,
                outcome.seconds,
                outcome.error,
                outcome.restore_missed,
                fault=outcome.fault,
                transient_bytes=outcome.transient_bytes,
                reading=outcome.reading,
                crowded=outcome.crowded,
            )
            for chunk, outcome in zip(chunks, outcomes, strict=True)
        )


def _dropped(chunks: tuple[Chunk, ...]) -> tuple[ChunkDone, ...]:
    return tuple(ChunkDone(chunk.row, 0, chunk.start, 0.0, dropped=True) for chunk in chunks)
