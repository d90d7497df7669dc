"""The engine process's mailboxes: they fill during a turn of the event loop, and one frame empties all of them.

No task and no future a stream: a row's event is appended to its outlet, which marks itself, and the link asks for the
marked ones' events once a turn. While the front does not read, outlets keep and merge theirs, as EventStream does.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..event_stream import merge
from ..events import ENDS, Failed, Finished, PrefillProgress, PromptLogprobs, TextDelta
from .link import MAX_FRAME_BYTES, frame_of
from .to_front import Events, StreamEvents, Words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..events import Event, PositionLogprobs
    from ..output.events import EventSplitter

    TokenText = Callable[[int], tuple[str, bytes]]

logger = logging.getLogger(__name__)


class Outlet:
    """Mailbox of one request. Owned by the event loop's thread.

    Args:
        number: of the call.
        outbox: what it empties into.
        choices: how many ends to expect.
        bound: waiting events beyond which deltas are merged.
        whole: give nothing away before the last choice has ended.
        words: knows the texts of tokens, if the request asked for log-probabilities.
    """

    __slots__ = (
        "_bound",
        "_ended",
        "_events",
        "_marked",
        "_open",
        "_outbox",
        "_splitter",
        "_started",
        "_whole",
        "number",
        "words",
    )

    def __init__(
        self,
        number: int,
        outbox: Outbox,
        *,
        choices: int,
        bound: int,
        whole: bool = False,
        words: WordsSent | None = None,
    ) -> None:
        self.number = number
        self.words = words
        self._outbox = outbox
        self._bound = bound
        self._whole = whole
        self._events: list[Event] = []
        self._ended: list[int] = []
        self._open = choices
        self._marked = False
        self._started = False
        self._splitter: EventSplitter | None = None

    @property
    def over(self) -> bool:
        """Every choice has ended."""
        return self._open <= 0

    def push(self, event: Event) -> None:
        """See `Mailbox`."""
        events = self._events
        if isinstance(event, ENDS):
            self._end(event)
        elif self._whole:
            if isinstance(event, PrefillProgress):
                return
        elif len(events) >= self._bound and merge(events, event):
            return
        events.append(event)
        if not self._marked:
            self._mark()

    def _end(self, event: Finished | Failed) -> None:
        self._open -= 1
        self._ended.append(event.index)
        if isinstance(event, Failed):
            self._outbox.failing = True

    def start(self, splitter: EventSplitter | None) -> None:
        """The request is accepted: from now on events may leave."""
        self._splitter = splitter
        self._started = True
        if self._events:
            self._mark()

    def stop(self) -> None:
        """Nobody listens any more."""
        self._started = False
        self._events.clear()

    def _mark(self) -> None:
        if self._started and (not self._whole or self._open <= 0):
            self._marked = True
            self._outbox.mark(self)

    def take(self) -> StreamEvents:
        """All that waits, taken apart."""
        events, self._events = self._events, []
        ended, self._ended = self._ended, []
        self._marked = False
        if self._splitter is not None:
            events = self._splitter.split(events)
        return StreamEvents(self.number, events, tuple(ended))


class WordsSent:
    """Which tokens' texts the front has; it gets each once, before the first event that names it.

    That is cheaper than the whole vocabulary after loading (150,000 texts, for a server that nobody may ask for
    log-probabilities) and than texts in every event.
    """

    def __init__(self, token_text: TokenText, model: str = "") -> None:
        self._token_text = token_text
        self._model = model
        self._sent: set[int] = set()

    def missing(self, events: Iterable[Event]) -> Words | None:
        """The texts that these events need and the front has not."""
        named = {token for event in events for token in _tokens_named(event)}
        new = named - self._sent
        if not new:
            return None
        self._sent |= new
        return Words([(token, *self._token_text(token)) for token in new], self._model)


def _tokens_named(event: Event) -> Iterable[int]:
    if isinstance(event, TextDelta):
        return _tokens_at(event.logprobs or ())
    if isinstance(event, PromptLogprobs):
        return [*event.tokens, *_tokens_at(event.logprobs)]
    return ()


def _tokens_at(positions: Iterable[PositionLogprobs]) -> list[int]:
    return [entry.token for position in positions for entry in (position.chosen, *position.top)]


class Outbox:
    """The outlets with something to say. Owned by the event loop's thread.

    Args:
        schedule: asks the link for a write at the end of this turn.
        ended: called with the number of a stream whose last events have been taken.
        broken: called with the number of a stream whose events cannot be sent, and why.
        failed: called before events leave, one of which says that something failed.
        limit_bytes: of a frame.

    Attributes:
        failing: a failure is among what waits.
    """

    def __init__(
        self,
        schedule: Callable[[], None],
        *,
        ended: Callable[[int], None],
        broken: Callable[[int, Exception], None],
        failed: Callable[[], None],
        limit_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.failing = False
        self._schedule = schedule
        self._on_ended = ended
        self._on_broken = broken
        self._on_failed = failed
        self._limit_bytes = limit_bytes
        self._marked: list[Outlet] = []

    def mark(self, outlet: Outlet) -> None:
        """This outlet has something to say."""
        self._marked.append(outlet)
        self._schedule()

    def gather(self) -> list[bytearray]:
        """Everything that waits, as frames: one of events, unless it would be too large."""
        marked, self._marked = self._marked, []
        if not marked:
            return []
        if self.failing:
            self.failing = False
            self._on_failed()
        frames: list[bytearray] = []
        streams = []
        for outlet in marked:
            try:
                found = outlet.take()
                words = None if outlet.words is None else outlet.words.missing(found.events)
            except Exception as error:
                logger.exception("the output of stream %d could not be taken apart", outlet.number)
                self._on_broken(outlet.number, error)
                continue
            if words is not None:
                frames.append(frame_of(words))
            streams.append(found)
            if outlet.over:
                self._on_ended(outlet.number)
        self._add(streams, frames)
        return frames

    def _add(self, streams: list[StreamEvents], frames: list[bytearray]) -> None:
        """One frame; where that cannot be, two halves; a stream that cannot be sent alone fails alone."""
        if not streams:
            return
        try:
            frames.append(frame_of(Events(streams), self._limit_bytes))
        except (TypeError, ValueError, OverflowError) as error:
            if len(streams) == 1:
                logger.error("events of stream %d cannot be sent: %s", streams[0].number, error)
                self._on_broken(streams[0].number, error)
                return
            middle = len(streams) // 2
            self._add(streams[:middle], frames)
            self._add(streams[middle:], frames)
