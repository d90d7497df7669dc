"""What a fake row must say, what its steps cost in virtual time, and what may go wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mlx_troupe.runtime.faults import Fault

_MASK = (1 << 64) - 1


class ProtocolError(AssertionError):
    """Policy asked the engine for something that a correct one never asks."""


def check(condition: object, text: str) -> None:
    """Raise ProtocolError unless `condition` holds."""
    if not condition:
        raise ProtocolError(text)


def mix(state: int, token: int) -> int:
    """The state of a KV after one more token."""
    state = (state ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & _MASK
    return state ^ state >> 29


def sample(state: int, seed: int, vocab_size: int, forbidden: Iterable[int] = ()) -> int:
    """The token that follows a KV state; the next one that is not forbidden."""
    token = mix(state, seed + 7) % vocab_size
    while token in forbidden:
        token = (token + 1) % vocab_size
    return token


def oracle(
    prompt: Sequence[int],
    max_tokens: int,
    *,
    seed: int = 0,
    vocab_size: int = 64,
    stop_tokens: frozenset[int] = frozenset(),
    min_tokens: int = 0,
) -> list[int]:
    """Output ids of a row that runs to its stop token (included) or to max_tokens."""
    state = 0
    for token in prompt:
        state = mix(state, token)
    output: list[int] = []
    while len(output) < max_tokens:
        forbidden = stop_tokens if len(output) < min_tokens else ()
        token = sample(state, seed, vocab_size, forbidden)
        output.append(token)
        if token in stop_tokens:
            break
        state = mix(state, token)
    return output


@dataclass
class Costs:
    """Virtual seconds; a chunk costs n * (token_s + depth_s * (depth + n / 2)) + chunk_s."""

    step_s: float = 0.0
    row_s: float = 0.0
    token_s: float = 0.0
    depth_s: float = 0.0
    chunk_s: float = 0.0

    def chunk(self, tokens: int, depth: int) -> float:
        """Seconds of a chunk."""
        return self.chunk_s + tokens * (self.token_s + self.depth_s * (depth + tokens / 2))


@dataclass
class Faults:
    """What goes wrong: rows whose step, join or chunk raises, and a step at which everything does.

    Attributes:
        poison: rows with which every shared forward raises, and how often.
        shaken_steps: numbers of plans whose forward raises once, whoever is in it.
        bad_state: rows whose logits are no numbers, and how often.
        bad_chunks: rows whose chunk raises in a way that is tried again, and how often.
        kind: what poison and shaken steps are called.
    """

    step_rows: set[int] = field(default_factory=set)
    join_rows: set[int] = field(default_factory=set)
    chunk_rows: set[int] = field(default_factory=set)
    die_at_step: int | None = None
    poison: dict[int, int] = field(default_factory=dict)
    shaken_steps: set[int] = field(default_factory=set)
    bad_state: dict[int, int] = field(default_factory=dict)
    bad_chunks: dict[int, int] = field(default_factory=dict)
    kind: Fault = "step"

    def strikes(self, faults: dict[int, int], row: int) -> bool:
        """Whether a counted fault strikes once more."""
        left = faults.get(row, 0)
        if left:
            faults[row] = left - 1
        return left > 0
