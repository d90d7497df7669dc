"""Prefill's decisions: computes prompts chunk by chunk up to their last token but one, then hands the rows to decode.

One offer is with decode at a time, so that the next choice knows how long the last one took. A second may follow it
when a short prompt arrives while a long chunk still waits for running rows to get their share: if decode has not
planned the long chunk yet, it reports it as dropped and runs the short one first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runtime.events import Embedded, PrefillProgress, PromptLogprobs
from ..runtime.messages.admission import Requeue, RowDone
from ..runtime.messages.cache_store import CacheStoreMessage, Match, PagesLost, Store, Unlease
from ..runtime.messages.decode import CancelRunning, DecodeMessage, Offer, Ready, Withdraw
from ..runtime.messages.executor import Chunk
from ..runtime.request import State
from .memory_ledger import MEMORY_FLOOR_TOKENS
from .prefill_cost import MUCH_BYTES
from .prefill_hold import HELD_STEP_S, ChunkHold
from .prefill_keep import KeepPlan, KeepRules, keep_plan
from .prefill_policy import (
    OVERTAKE_SHARE,
    SHORT_S,
    PrefillPolicy,
    Prompt,
    begins_below,
    choose,
    fresh,
    in_order,
    owed_s,
    spare,
    staged_room,
)
from .returns import survives

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..runtime.clock import Clock
    from ..runtime.errors import TroupeError
    from ..runtime.messages.admission import AdmissionMessage
    from ..runtime.messages.prefill import ChunkDone, ChunksDone, Matched
    from ..runtime.peers import Peer
    from ..runtime.request import Request
    from .prefill_cost import ChunkCost
    from .transients import ChunkMemory


class PrefillCore:
    """Owned by the prefill actor, who sends what is in the outboxes after each turn.

    Args:
        policy: the settings.
        cost: predicts chunk times; learns from each chunk.
        keep: what is kept of prompts.
        clock: for deadlines and patience.
        memory: sizes chunks by memory as well; None does not.
        peer: this engine among the others of the process; None when it is the only one.
    """

    def __init__(
        self,
        policy: PrefillPolicy,
        cost: ChunkCost,
        *,
        keep: KeepRules,
        clock: Clock,
        memory: ChunkMemory | None = None,
        peer: Peer | None = None,
    ) -> None:
        self.to_admission: list[AdmissionMessage] = []
        self.to_cache: list[CacheStoreMessage] = []
        self.to_decode: list[DecodeMessage] = []
        self.prompt_tokens = 0
        self.chunks = 0
        self.throttled_chunks = 0
        self.cost = cost
        self.memory = memory
        self.peer = peer
        self.hold = ChunkHold()
        self._below_bytes = 0
        self._retry_s: float | None = None
        self._policy = policy
        self._keep = keep
        self._stores_full = False
        self._clock = clock
        self._prompts: dict[int, Prompt] = {}
        self._offered: dict[int, tuple[Prompt, Chunk]] = {}
        self._overtaken = False
        self._must_answer = False
        self._decoding = 0
        self._chunk_s = 0.0
        self._stores = 0

    @property
    def prefilling(self) -> int:
        """Rows whose prompt is being computed."""
        return sum(len(prompt.rows) for prompt in self._prompts.values())

    @property
    def idle(self) -> bool:
        """True when no prompt is left and no chunk is with decode."""
        return not (self._prompts or self._offered)

    def admit(self, rows: tuple[Request, ...], chunk_room_bytes: int | None = None) -> None:
        """Begin with a new prompt. The next chunk may take `chunk_room_bytes`."""
        if self.memory is not None and chunk_room_bytes is not None:
            self.memory.room_bytes = chunk_room_bytes
        now_s = self._clock.now()
        prompt = Prompt(rows, now_s, self._keep.page_tokens)
        self._prompts[prompt.leader] = prompt
        cached = rows[0].cache and self._keep.page_tokens > 0 and prompt.target > 0
        prompt.keep = keep_plan(self._keep, prompt.target, rows[0].turn_start, 0, cached=cached)
        for request in rows:
            if not request.finished:
                request.move(State.RESTORING if cached else State.PREFILLING)
        if cached:
            self._ask_match(prompt)
        elif not prompt.target:
            self._complete(prompt)

    def matched(self, answer: Matched) -> None:
        """The cache-store's answer."""
        prompt = self._prompts.get(answer.row)
        if prompt is None:
            self.to_cache.append(Unlease(answer.row))
            return
        prompt.matching = prompt.restoring = False
        prompt.restore = answer.pages
        if answer.branch:
            turn_start = prompt.rows[0].turn_start
            prompt.keep = keep_plan(self._keep, prompt.target, turn_start, answer.branch, cached=True)
        self._advance(prompt, answer.tokens)
        for request in prompt.rows:
            if not request.returns:
                request.cached = answer.tokens
            if request.state is State.RESTORING:
                request.move(State.PREFILLING)

    def restoring(self, row: int) -> None:
        """The answer to this row's question takes a while: others go on."""
        prompt = self._prompts.get(row)
        if prompt is not None:
            prompt.matching, prompt.restoring = False, True

    def stores(self, *, full: bool) -> None:
        """Whether so many stores are under way that prompts that have not begun must wait."""
        self._stores_full = full

    def done(self, report: ChunksDone) -> None:
        """Chunks have run, or were dropped."""
        self._decoding = report.decoding_rows
        self._must_answer = True
        measured_s = 0.0
        self._take_memory(report)
        for outcome in report.chunks:
            prompt, chunk = self._offered.pop(outcome.row)
            prompt.offered = None
            if outcome.dropped or outcome.crowded:
                self._unlease_ended(prompt)
            else:
                measured_s += outcome.seconds
                self._ran(prompt, chunk, outcome)
        if measured_s:
            self._chunk_s = measured_s
        if self.peer is not None and not self._offered:
            self.peer.end_turn(measured_s, self._policy.fair_share, self._clock.now())
        if not self._offered:
            self._overtaken = False

    def _take_memory(self, report: ChunksDone) -> None:
        """Measure the room, and see whether chunks found too little of it."""
        if self.memory is None:
            return
        self.memory.used(report.active_bytes)
        crowded = [outcome for outcome in report.chunks if outcome.crowded]
        if not crowded:
            if any(not outcome.dropped for outcome in report.chunks):
                self.hold.held, self._retry_s = False, None
            return
        self.hold.crowded += 1
        self._retry_s = 0.0
        if sum(len(self._offered[outcome.row][1].tokens) for outcome in crowded) <= MEMORY_FLOOR_TOKENS:
            self._retry_s = HELD_STEP_S
            lacking = report.active_bytes - self._below_bytes
            to_cache, to_decode = self.hold.lacks(crowded[0].row, lacking, self._clock.now())
            self.to_cache += to_cache
            self.to_decode += to_decode

    def set_line(self, line_bytes: int) -> None:
        """Chunks may be planned to bring the use of memory up to so many bytes."""
        if self.memory is not None:
            self.memory.line_bytes = line_bytes

    def load(self, decoding_rows: int) -> None:
        """Decode has begun or stopped to have rows."""
        self._decoding = decoding_rows

    def cancel(self, rows: Iterable[int], *, timeout: bool = False) -> None:
        """End rows that are here; decode gets the others."""
        wanted = set(rows)
        for prompt in list(self._prompts.values()):
            for request in [request for request in prompt.rows if request.row in wanted]:
                wanted.discard(request.row)
                self._end(prompt, request, timeout=timeout)
        if wanted:
            self.to_decode.append(CancelRunning(tuple(sorted(wanted)), timeout))

    def expire(self) -> None:
        """End rows whose deadline has passed, and forget those that their owner outside has ended."""
        now_s = self._clock.now()
        for prompt in list(self._prompts.values()):
            for request in list(prompt.rows):
                late = request.deadline_s is not None and request.deadline_s <= now_s
                if late or request.finished:
                    self._end(prompt, request, timeout=True)

    def fail_all(self, error: TroupeError) -> None:
        """End every row with an error."""
        for prompt in list(self._prompts.values()):
            self._fail(prompt, error)

    def settle(self) -> None:
        """Offer the next chunks, and answer decode's report if one came."""
        if self.peer is not None:
            self.peer.decoding = self._decoding
        offer = self._next_offer()
        if offer is not None:
            self.to_decode.append(offer)
        elif self._must_answer:
            self.to_decode.append(Offer((), 0.0))
        self._must_answer = False

    def _next_offer(self) -> Offer | None:
        if any(prompt.matching for prompt in self._prompts.values()):
            return None  # the cache-store answers within microseconds
        now_s = self._clock.now()
        fit = fresh([prompt for prompt in self._prompts.values() if not prompt.restoring], now_s)
        free = [prompt for prompt in fit if prompt.offered is None]
        if self._stores_full:
            free = [prompt for prompt in free if prompt.matched is None]
        contended = self._decoding > 0 or (self.peer is not None and self.peer.others_decode)
        if self._offered:
            free = self._overtakers(free)
        ordered = in_order(free, self.cost, now_s)
        chosen = choose(ordered, self.cost, self._policy, contended=contended, memory=self.memory)
        stale = [prompt for prompt, _ in chosen if prompt.matched is not None and prompt.matched < self._stores]
        for prompt in stale:
            self._ask_match(prompt)
        if not self._has_turn(now_s, wanted=bool(chosen)) or not chosen or stale:
            return None
        self._overtaken = bool(self._offered)
        chunks = tuple([self._offer(prompt, tokens) for prompt, tokens in chosen])
        owed = owed_s(self._policy, self._chunk_s, contended=contended)
        self._below_bytes = self._limit(chosen)
        return Offer(chunks, owed if self._retry_s is None else self._retry_s, self._below_bytes)

    def _limit(self, chosen: list[tuple[Prompt, int]]) -> int:
        """Use of memory up to which these chunks may begin; 0 is any: a smallest one has its room if nobody decodes."""
        if self.memory is None:
            return 0
        smallest = sum(tokens for _, tokens in chosen) <= MEMORY_FLOOR_TOKENS
        return 0 if smallest and not self._decoding else max(1, begins_below(chosen, self.memory, smallest=smallest))

    def _has_turn(self, now_s: float, *, wanted: bool) -> bool:
        """Whether no other engine's decode or chunk stands against a chunk now."""
        if self.peer is None or self._offered:
            return True
        if wanted:
            return self.peer.take_turn(now_s)
        self.peer.give_up()
        return True

    def _overtakers(self, free: list[Prompt]) -> list[Prompt]:
        """Prompts so short that they should go before a long chunk which decode was offered already."""
        if self._overtaken:
            return []
        offered = [(self._cost(prompt), chunk) for prompt, chunk in self._offered.values()]
        offered_s = sum(cost.seconds(len(chunk.tokens), chunk.start) for cost, chunk in offered)
        limit_s = offered_s * OVERTAKE_SHARE if offered_s > SHORT_S else 0.0
        return [prompt for prompt in free if self._cost(prompt).seconds(prompt.remaining, prompt.computed) < limit_s]

    def _cost(self, prompt: Prompt) -> ChunkCost:
        return self.cost.of(scored=prompt.scored)

    def _offer(self, prompt: Prompt, tokens: int) -> Chunk:
        start, end = prompt.computed, prompt.computed + tokens
        keep = prompt.keep or KeepPlan()
        stash = tuple([at for at in keep.ends if start < at <= end])
        chunk = Chunk(
            prompt.leader,
            tuple(prompt.tokens[start:end]),
            start,
            prompt.restore,
            start if prompt.restore else 0,
            tuple([cut for cut in keep.cuts if start < cut < end]),
            stash,
            tuple([at for at in stash if at in keep.checkpoints]),
            prompt.reading,
            tuple(prompt.tokens[end : end + 1]) if prompt.scored else (),
            prompt.target,
        )
        prompt.offered = tokens
        prompt.throttled = (
            self.memory is not None and tokens < prompt.remaining and not spare(prompt, self.memory, tokens)
        )
        self._offered[prompt.leader] = (prompt, chunk)
        return chunk

    def _ran(self, prompt: Prompt, chunk: Chunk, outcome: ChunkDone) -> None:
        if outcome.error is None and not outcome.restore_missed:
            self.chunks += 1
            self.throttled_chunks += prompt.throttled
            self._learn(prompt, chunk, outcome)
            prompt.staged_room = staged_room(prompt, outcome.tokens)
            self._store(prompt, chunk)
            self._take_reading(prompt, outcome)
        if chunk.restore_pages:
            self.to_cache.append(Unlease(prompt.leader))
            prompt.restore = ()
        if prompt.leader not in self._prompts:
            return
        prompt.matched = None
        if outcome.error is not None:
            self._chunk_failed(prompt, chunk, outcome)
        elif outcome.restore_missed:
            self._restart(prompt, chunk)
        else:
            self._progress(prompt, chunk.start + len(chunk.tokens))

    def _learn(self, prompt: Prompt, chunk: Chunk, outcome: ChunkDone) -> None:
        """What chunks cost. One that made room for the whole prompt tells what that costs."""
        first = not prompt.staged_room and not prompt.restore
        grown_bytes = 0 if self.memory is None or first else self.memory.widened_bytes(prompt)
        if grown_bytes >= MUCH_BYTES:
            self.cost.observe_widening(outcome.tokens, outcome.start, outcome.seconds, grown_bytes)
        elif not chunk.restore_pages:
            self._cost(prompt).observe(outcome.tokens, outcome.start, outcome.seconds)
        undisturbed = self.peer is None or self.peer.undisturbed
        if self.memory is not None and undisturbed and not chunk.restore_pages:
            self.memory.observe(outcome.tokens, outcome.start, outcome.transient_bytes)

    def _chunk_failed(self, prompt: Prompt, chunk: Chunk, outcome: ChunkDone) -> None:
        """Its rows go back to the queue, or end with the error; pages that may have been bad are forgotten."""
        if chunk.restore_pages and outcome.fault == "state":
            self.to_cache.append(PagesLost(chunk.restore_pages))
        back: list[Request] = []
        now_s = self._clock.now()
        for request in list(prompt.rows):
            if survives(request, outcome.fault, outcome.error or "", now_s, alone=False):
                back.append(request)
                prompt.rows.remove(request)
                request.send_back(leader=prompt.leader)
        if back:
            self.to_admission.append(Requeue(tuple(back)))
        for request in list(prompt.rows):
            self._drop(prompt, request)
        if back and prompt.leader in self._prompts:
            self._close(prompt)

    def _take_reading(self, prompt: Prompt, outcome: ChunkDone) -> None:
        if outcome.reading is not None:
            prompt.logprobs += outcome.reading.logprobs
            prompt.vector = outcome.reading.vector

    def _store(self, prompt: Prompt, chunk: Chunk) -> None:
        if not chunk.stash:
            return
        tokens = tuple(prompt.tokens[: chunk.stash[-1]])
        self.to_cache.append(Store(prompt.leader, tokens, chunk.stash, chunk.checkpoints, prompt.namespace))
        self._stores += 1

    def _restart(self, prompt: Prompt, chunk: Chunk) -> None:
        """The pages were gone: compute the prompt from its start."""
        self.to_cache.append(PagesLost(chunk.restore_pages))
        prompt.staged_room = 0
        self._advance(prompt, 0)
        for request in prompt.rows:
            request.cached = 0

    def _progress(self, prompt: Prompt, computed: int) -> None:
        prompt.served_s = self._clock.now()
        self._advance(prompt, computed)
        total = len(prompt.tokens)
        if prompt.rows[0].returns:  # its client has seen this progress already
            if not prompt.remaining:
                self._complete(prompt)
        elif prompt.remaining:
            prompt.rows[0].events.push(PrefillProgress(computed, total))
        else:
            prompt.rows[0].events.push(PrefillProgress(total, total))
            self._complete(prompt)

    def _advance(self, prompt: Prompt, computed: int) -> None:
        prompt.computed = computed
        for request in prompt.rows:
            request.computed = computed

    def _tell_reading(self, prompt: Prompt) -> None:
        """What was read off the prompt goes out once, whatever becomes of the rows later."""
        for request in prompt.rows:
            if request.finished or (reading := request.reading) is None:
                continue
            request.reading = None
            if reading.pooling is not None:
                request.events.push(Embedded(prompt.vector, request.index))
            else:
                request.events.push(PromptLogprobs(tuple(prompt.tokens), tuple(prompt.logprobs), request.index))

    def _complete(self, prompt: Prompt) -> None:
        self._tell_reading(prompt)
        if not prompt.rows[0].returns:
            self.prompt_tokens += len(prompt.tokens)
        if not prompt.rows[0].max_tokens:
            for request in list(prompt.rows):
                request.finish("length", self._clock.now())
                self._drop(prompt, request)
            return
        del self._prompts[prompt.leader]
        rows = tuple(prompt.rows)
        self._decoding += len(rows)
        self.to_decode.append(Ready(rows))

    def _ask_match(self, prompt: Prompt) -> None:
        before = None if prompt.matched is None else prompt.computed
        prompt.matching = True
        prompt.matched = self._stores
        self.to_cache.append(Match(prompt.leader, tuple(prompt.tokens), prompt.namespace, before))

    def _end(self, prompt: Prompt, request: Request, *, timeout: bool) -> None:
        request.finish("timeout" if timeout else "cancelled", self._clock.now())
        self._drop(prompt, request)

    def _fail(self, prompt: Prompt, error: TroupeError) -> None:
        for request in list(prompt.rows):
            request.fail(error, self._clock.now())
            self._drop(prompt, request)

    def _drop(self, prompt: Prompt, request: Request) -> None:
        """Take out a row that has ended, and the prompt with its last row."""
        prompt.rows.remove(request)
        self.to_admission.append(RowDone(request.row))
        if not prompt.rows:
            self._close(prompt)

    def _close(self, prompt: Prompt) -> None:
        """A prompt whose rows have all ended or gone back."""
        del self._prompts[prompt.leader]
        self.to_decode.append(Withdraw((prompt.leader,)))
        self._unlease_ended(prompt)

    def _unlease_ended(self, prompt: Prompt) -> None:
        """Give back the pages of a prompt that has ended, unless an offered chunk still names them."""
        if prompt.leader not in self._prompts and prompt.restore and prompt.offered is None:
            self.to_cache.append(Unlease(prompt.leader))
