"""Whose prompt goes on next, and how far: pure functions over prompts and predicted seconds.

- Shortest remaining time first, so that a short request does not wait for a long one; but the prompt admitted first
  goes first whenever it has not been served for PATIENCE_S, so that nobody starves.
- While rows decode, a chunk may last the stall target, larger caches for its row included. Otherwise it may be
  `chunk_tokens` long, within IDLE_STALLS stall targets: on a slow machine a cancel or a new short prompt would else
  wait for it too long.
- Short prompts are served several at once, while all of them together stay under a small budget.
- A chunk is never larger than its transient memory allows, down to a floor that admission has kept room for.
- Of prompts that start with the same page, one goes first: the others find its pages stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..runtime.kv_estimate import GRAIN_TOKENS, room_for, round_up
from ..runtime.prefix_page import KEY_BYTES, common_bytes, token_key
from .memory_ledger import MEMORY_FLOOR_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..runtime.events import PositionLogprobs
    from ..runtime.request import Request
    from .prefill_cost import ChunkCost
    from .prefill_keep import KeepPlan
    from .transients import ChunkMemory

PATIENCE_S = 2.0
FLOOR_TOKENS = 16
IDLE_FLOOR_TOKENS = 256
IDLE_STALLS = 4.0
SHORT_S = 0.05
FRESHNESS_S = 4.0
"""Longest a prompt waits for another to compute what both need."""
FRESH_SHARE = 0.3
FRESH_TOKENS = 8192
"""It waits when the other brings so large a share of it, or so many tokens."""
OVERTAKE_SHARE = 0.5


class PrefillPolicy(msgspec.Struct, frozen=True):
    """Settings of the choice, see RuntimeConfig."""

    chunk_tokens: int = 2048
    stall_target_s: float = 0.5
    fair_share: float = 0.3


class Prompt:
    """A prompt being computed, for one row or several. Owned by the prefill core.

    Attributes:
        leader: row number that the engine keeps its KV under; stays, even if that row ends early.
        rows: rows that will join from it.
        target: tokens to compute: all but the last.
        computed: of these, how many are done or restored.
        restore: page ids that make up the first `computed` tokens, until the first chunk has brought them in.
        restoring: pages for it are on their way from disk.
        throttled: whether memory made the chunk that was offered last shorter.
        staged_room: tokens that its caches on the engine have room for.
        head: stands for the tokens of the first page; None when the prompt takes no part in the cache.
        keep: where pieces of it are kept, ascending, and checkpoints taken; see prefill_keep.
        matched: value of the core's store count when the cache was asked last; None once work has begun.
        commons: by leader, how many tokens another prompt has in common with this one, once that was asked.
        offered: chunk tokens that decode was offered; None when none are.
        reading: what is read off it; logprobs and vector are what it gave so far.
        waits_until_s: how long it may wait for another prompt that computes what it needs.
    """

    __slots__ = (
        "commons",
        "computed",
        "head",
        "keep",
        "key",
        "logprobs",
        "leader",
        "matched",
        "matching",
        "namespace",
        "offered",
        "reading",
        "restore",
        "restoring",
        "rows",
        "served_s",
        "staged_room",
        "target",
        "throttled",
        "tokens",
        "vector",
        "waits_until_s",
    )

    def __init__(self, rows: tuple[Request, ...], now_s: float, page_tokens: int) -> None:
        first = rows[0]
        self.leader = first.leader
        self.rows = list(rows)
        self.tokens = first.known_tokens
        self.namespace = first.namespace
        self.target = first.prefill_target
        self.reading = first.reading
        self.logprobs: list[PositionLogprobs] = []
        self.vector = b""
        self.computed = 0
        self.restore: tuple[int, ...] = ()
        self.served_s = now_s
        self.restoring = False
        self.staged_room = 0
        self.throttled = False
        cached = first.cache and page_tokens > 0
        begins = (first.namespace, *self.tokens[:page_tokens])
        self.head = hash(begins) if cached and self.target >= page_tokens else None
        self.keep: KeepPlan | None = None
        self.key = token_key(self.tokens) if self.head is not None else b""
        self.commons: dict[int, int] = {}
        self.waits_until_s = now_s + FRESHNESS_S
        self.matched: int | None = None
        self.matching = False
        self.offered: int | None = None

    @property
    def remaining(self) -> int:
        """Tokens still to compute."""
        return self.target - self.computed

    @property
    def scored(self) -> bool:
        """Whether its chunks compute logits, which costs more."""
        return self.reading is not None and self.reading.top_logprobs is not None


def in_order(prompts: Iterable[Prompt], cost: ChunkCost, now_s: float) -> list[Prompt]:
    """Who is served first. `prompts` come in the order of their admission."""
    waiting = list(prompts)
    if not waiting:
        return []
    oldest = waiting[0] if now_s - waiting[0].served_s >= PATIENCE_S else None
    waiting.sort(key=lambda prompt: cost.of(scored=prompt.scored).seconds(prompt.remaining, prompt.computed))
    if oldest is not None and waiting[0] is not oldest:
        waiting.remove(oldest)
        waiting.insert(0, oldest)
    return waiting


def chunk_tokens(
    prompt: Prompt, cost: ChunkCost, policy: PrefillPolicy, *, contended: bool, memory: ChunkMemory | None = None
) -> int:
    """How many tokens the prompt's next chunk has; 0 only when all are restored."""
    widening_s = 0.0 if memory is None else cost.widening_s(memory.widened_bytes(prompt))
    cost = cost.of(scored=prompt.scored)
    if contended:
        left_s = max(0.0, policy.stall_target_s - widening_s)
        within = max(FLOOR_TOKENS, cost.tokens_within(left_s, prompt.computed))
    else:
        idle_s = policy.stall_target_s * IDLE_STALLS
        within = max(IDLE_FLOOR_TOKENS, cost.tokens_within(idle_s, prompt.computed))
    if memory is not None:
        room = memory.tokens_within(prompt.computed, memory.widened_bytes(prompt))
        within = min(within, max(MEMORY_FLOOR_TOKENS, room))
    return min(prompt.remaining, policy.chunk_tokens, within)


def choose(
    ordered: list[Prompt],
    cost: ChunkCost,
    policy: PrefillPolicy,
    *,
    contended: bool,
    memory: ChunkMemory | None = None,
) -> list[tuple[Prompt, int]]:
    """The next prompts to work on and their chunk sizes: the first in order, and short ones that fit beside it."""
    if not ordered:
        return []
    first = ordered[0]
    tokens = chunk_tokens(first, cost, policy, contended=contended, memory=memory)
    chosen = [(first, tokens)]
    budget_s = SHORT_S if contended else policy.stall_target_s
    spent_s = cost.of(scored=first.scored).seconds(tokens, first.computed)
    heads = {first.head}
    for prompt in ordered[1:]:
        if prompt.remaining > policy.chunk_tokens:
            continue
        seconds = cost.of(scored=prompt.scored).seconds(prompt.remaining, prompt.computed)
        if spent_s + seconds > budget_s:
            continue
        if prompt.head is not None and not prompt.computed and prompt.head in heads:
            continue
        more = [*chosen, (prompt, prompt.remaining)]
        if memory is not None and not fits(more, memory):
            continue
        spent_s += seconds
        heads.add(prompt.head)
        chosen = more
    return chosen


def fits(chosen: list[tuple[Prompt, int]], memory: ChunkMemory) -> bool:
    """Whether there is memory for all these chunks, which may run in one forward."""
    tokens, depth, widened = _together(chosen, memory)
    return tokens <= memory.tokens_within(depth, widened)


def spare(prompt: Prompt, memory: ChunkMemory, tokens: int) -> bool:
    """Whether there is memory for more than these tokens of the prompt."""
    return memory.tokens_within(prompt.computed, memory.widened_bytes(prompt)) > tokens


def begins_below(chosen: list[tuple[Prompt, int]], memory: ChunkMemory, *, smallest: bool) -> int:
    """Most that may be in use where these chunks begin. Smallest ones respect the stable line only."""
    tokens, depth, widened = _together(chosen, memory)
    return memory.begins_below(tokens, depth, widened, smallest=smallest)


def staged_room(prompt: Prompt, tokens: int) -> int:
    """Tokens that the prompt's caches on the engine have room for once a chunk of `tokens` has run."""
    if not prompt.staged_room and not prompt.restore:
        return round_up(tokens, GRAIN_TOKENS)
    return max(prompt.staged_room, room_for(prompt.target))


def _together(chosen: list[tuple[Prompt, int]], memory: ChunkMemory) -> tuple[int, int, int]:
    """Of chunks that may run in one forward: tokens, depth, and bytes that caches grow by besides."""
    tokens = sum(count for _, count in chosen)
    depth = max(prompt.computed for prompt, _ in chosen)
    return tokens, depth, sum(memory.widened_bytes(prompt) for prompt, _ in chosen)


def owed_s(policy: PrefillPolicy, chunk_s: float, *, contended: bool) -> float:
    """Seconds of decode steps due to running rows after chunks that took `chunk_s`."""
    return policy.fair_share * chunk_s if contended else 0.0


def fresh(prompts: list[Prompt], now_s: float) -> list[Prompt]:
    """The prompts that should go on now: all but those that do better to wait for what another is computing.

    A prompt that has not begun waits for one further on, at most FRESHNESS_S, when that one brings it enough.
    """
    return [prompt for prompt in prompts if not any(_brings_enough(other, prompt, now_s) for other in prompts)]


def _brings_enough(other: Prompt, prompt: Prompt, now_s: float) -> bool:
    begun = prompt.matched is None or prompt.offered is not None
    if other is prompt or begun or prompt.head is None or prompt.head != other.head or now_s >= prompt.waits_until_s:
        return False
    if other.matched is not None and other.offered is None and not _goes_first(other, prompt):
        return False
    more = _common_tokens(prompt, other) - max(prompt.computed, other.computed)
    return more >= min(FRESH_SHARE * len(prompt.tokens), FRESH_TOKENS)


def _common_tokens(prompt: Prompt, other: Prompt) -> int:
    """Tokens that both begin with; compared once a pair."""
    known = prompt.commons.get(other.leader)
    if known is None:
        known = prompt.commons[other.leader] = common_bytes(prompt.key, other.key) // KEY_BYTES
    return known


def _goes_first(other: Prompt, prompt: Prompt) -> bool:
    """Of two that have not begun, the one admitted first computes for both."""
    return other.leader < prompt.leader
