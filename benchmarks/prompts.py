"""Prompts and sampling parameters of the load, the same for every server.

Each stream has its own prompt, and `salt` (one per round) opens it, so a prefix cache that
remembers an earlier round gains nothing. The words are common English ones: about one token each
for a real tokenizer, about five for the tiny model's.
"""

from __future__ import annotations

import random
from typing import Any, Literal

Endpoint = Literal["chat", "completions"]
Sampling = Literal["greedy", "mixed", "unseeded"]
Shape = Literal["fixed", "ragged"]

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
RAGGED_SPREAD = 8
"""The longest ragged prompt has about this many times the words of the shortest."""

_TEXT = """
the river was cold and the people went home to eat bread with their friends after a long day of work in
the fields near the old town where music and light came from every open window until late at night
"""
WORDS = tuple(_TEXT.split())


def words(count: int, salt: str) -> str:
    """`count` words in an order that `salt` decides; texts of different salts share no prefix."""
    order = random.Random(salt)
    return " ".join([f"[{salt}]", *order.choices(WORDS, k=count)])


def prompt_words(stream: int, streams: int, shape: Shape, base_words: int) -> int:
    """Words in the prompt of stream number `stream`."""
    if shape == "fixed":
        return base_words
    # Multiplying by 7 keeps neighbours unequal without a random draw.
    position = (stream * 7 % streams) / max(1, streams - 1)
    return round(base_words * (1 + (RAGGED_SPREAD - 1) * min(1.0, position)))


def sampling_fields(stream: int, sampling: Sampling) -> dict[str, Any]:
    """Greedy, or a temperature, top_p and (unless `unseeded`) seed of the stream's own."""
    if sampling == "greedy":
        return {"temperature": 0.0}
    fields = {"temperature": 0.5 + 0.1 * (stream % 7), "top_p": 0.8 + 0.02 * (stream % 10)}
    return fields if sampling == "unseeded" else fields | {"seed": 1000 + stream}


def request_body(endpoint: Endpoint, prompt: str, max_tokens: int, fields: dict[str, Any]) -> dict[str, Any]:
    """A streaming request that asks for usage."""
    content: dict[str, Any] = {"prompt": prompt}
    if endpoint == "chat":
        content = {"messages": [{"role": "user", "content": prompt}]}
    return {
        **content,
        **fields,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
