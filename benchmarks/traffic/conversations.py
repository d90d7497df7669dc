"""Conversations: what one user says, turn by turn, drawn from a workload with a seed.

The same workload, seed and repeat give the same conversations for every server. Unshared text opens with a salt of its
own, so that neither an earlier repeat nor a neighbour warms a prefix cache by accident; shared prefixes are shared
within one repeat only, so that each repeat finds the cache as cold as the first.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from typing import TYPE_CHECKING, Any

import msgspec

from ..prompts import words
from .lengths import Fixed, Lengths
from .recorded import HASH_BLOCK_TOKENS, RecordedRequest
from .sampling_mix import SamplingMix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .arrivals import Level

Message = dict[str, Any]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked.

    Attributes:
        prompt: tokens of each user turn.
        output: `max_tokens` of each answer.
        sampling: of each request.
        prefix_tokens: length of the shared opening; 0 is none.
        prefix_groups: how many different openings there are.
        turns: of each conversation.
        leave_rate: share of requests whose client disconnects somewhere in the answer.
        honour_eos: let a model end early.
        recorded: requests to take texts or lengths from, in turn.
        tokens_per_word: of the server's tokenizer, for the made-up text.
        seed: of everything that is drawn.
    """

    prompt: Lengths = Fixed(128)
    output: Lengths = Fixed(64)
    sampling: SamplingMix = SamplingMix()
    prefix_tokens: int = 0
    prefix_groups: int = 1
    turns: int = 1
    leave_rate: float = 0.0
    honour_eos: bool = False
    recorded: tuple[RecordedRequest, ...] = ()
    tokens_per_word: float = 1.0
    seed: int = 0


class Turn(msgspec.Struct, frozen=True):
    """One request of a conversation.

    Attributes:
        messages: what is added to the conversation before the answer.
        max_tokens: of the answer.
        fields: sampling and other fields of the request.
        leave_after: pieces of text after which the client disconnects; None stays to the end.
    """

    messages: tuple[Message, ...]
    max_tokens: int
    fields: dict[str, Any]
    leave_after: int | None = None


class Conversation(msgspec.Struct, frozen=True):
    """What one user does; `at_s` is when it is meant to start, None in a closed loop."""

    number: int
    at_s: float | None
    turns: tuple[Turn, ...]


def conversations(workload: Workload, level: Level, salt: str) -> Iterator[Conversation]:
    """Conversations without end, or as many as a replay has. `salt` must differ between repeats on one server."""
    arrivals_rng = random.Random(f"{workload.seed}-{salt}-arrivals")
    times = itertools.repeat(None) if level.schedule is None else level.schedule.times_s(arrivals_rng)
    for number, at_s in enumerate(times):
        rng = random.Random(f"{workload.seed}-{salt}-{number}")
        turns = tuple(_turn(workload, salt, number, turn, rng) for turn in range(workload.turns))
        yield Conversation(number, at_s, turns)


def _turn(workload: Workload, salt: str, number: int, turn: int, rng: random.Random) -> Turn:
    recorded = _recorded(workload, number * workload.turns + turn)
    max_tokens = recorded.max_tokens or workload.output.draw(rng)
    fields = workload.sampling.draw(number, rng)
    if not workload.honour_eos:
        fields["ignore_eos"] = True
    messages = recorded.messages or _made_up(workload, recorded, salt, f"{number}-{turn}", rng)
    if turn == 0 and workload.prefix_tokens:
        group = _opening(f"{salt}-shared-{number % workload.prefix_groups}")
        opening = words(_words(workload, workload.prefix_tokens), group)
        messages = ({"role": "system", "content": opening}, *messages)
    leaves = rng.random() < workload.leave_rate
    return Turn(messages, max_tokens, fields, rng.randint(1, max_tokens) if leaves else None)


def _recorded(workload: Workload, number: int) -> RecordedRequest:
    return workload.recorded[number % len(workload.recorded)] if workload.recorded else RecordedRequest()


def _made_up(
    workload: Workload, recorded: RecordedRequest, salt: str, own: str, rng: random.Random
) -> tuple[Message, ...]:
    tokens = recorded.prompt_tokens or workload.prompt.draw(rng)
    if recorded.blocks:
        text = _block_text(workload, recorded.blocks, tokens, salt)
    else:
        text = words(_words(workload, tokens), _opening(f"{salt}-{own}"))
    return ({"role": "user", "content": text},)


def _opening(salt: str) -> str:
    """What a text begins with: eight digits of the salt's digest, so that texts differ from their first token on."""
    return hashlib.blake2b(salt.encode(), digest_size=4).hexdigest()


def _block_text(workload: Workload, blocks: tuple[int, ...], tokens: int, salt: str) -> str:
    """Text of the blocks in order, the last one cut so that there are `tokens` in all; equal ids agree in a repeat."""
    pieces = []
    for place, block in enumerate(blocks):
        size = min(HASH_BLOCK_TOKENS, tokens - place * HASH_BLOCK_TOKENS)
        if size > 0:
            pieces.append(words(_words(workload, size), _opening(f"{salt}-block-{block}")))
    return " ".join(pieces)


def _words(workload: Workload, tokens: int) -> int:
    return max(1, round(tokens / workload.tokens_per_word))
