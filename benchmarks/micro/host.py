"""What the host does beside the device: the prefix tree, messages, detokenising, server-sent events."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import anyio
import msgspec

from mlx_troupe.api.sse import ChatChunkEncoder, StreamHead
from mlx_troupe.runtime.actor import Actor
from mlx_troupe.runtime.events import TextDelta
from mlx_troupe.runtime.prefix_page import token_key
from mlx_troupe.runtime.prefix_tree import PrefixTree
from mlx_troupe.runtime.text.stream import TextStream
from mlx_troupe.runtime.text.token_decoders import PieceDecoder

from .case import Case, best_s

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .machine import MachineRates

PAGE_TOKENS = 256
STORED_PROMPTS = 64
MESSAGES = 1_000
TOKENS = 1_000


def tree_cases(rates: MachineRates, contexts: list[int], repeats: int) -> Iterator[Case]:
    """A prompt found and a prompt stored, in a tree of `STORED_PROMPTS` others. Floor: the keys compared once."""
    rng = random.Random(0)
    for context in contexts:
        tree = PrefixTree(page_tokens=PAGE_TOKENS, token_bytes=1.0, budget_bytes=1 << 40)
        ends = [*range(PAGE_TOKENS, context + 1, PAGE_TOKENS)] or [context]
        prompts = [[rng.randrange(1, 50_000) for _ in range(context)] for _ in range(STORED_PROMPTS)]
        for prompt in prompts:
            tree.insert(prompt, ends)
        key_bytes = len(token_key(prompts[0]))
        floor_s = key_bytes / rates.host_bytes_s
        floor = f"{key_bytes / 1e3:.3g} kB of token ids at {rates.host_bytes_s / 1e9:.3g} GB/s"

        def match(tree: PrefixTree = tree, prompts: list[list[int]] = prompts) -> None:
            tree.match(1, prompts[7], len(prompts[7]))

        def insert(tree: PrefixTree = tree, ends: list[int] = ends, context: int = context) -> None:
            tree.insert([rng.randrange(1, 50_000)] * context, ends)

        for name, work in (("match", match), ("insert", insert)):
            seconds = best_s(work, repeats=repeats * 10)
            yield Case(part=f"tree {name}", case=f"{context} tokens", measured_s=seconds, floor_s=floor_s, floor=floor)


class _Note(msgspec.Struct, frozen=True, tag=True):
    """A message that says nothing."""


class _Relay(Actor[_Note]):
    """Tells itself, until enough was told."""

    left = 0

    def __init__(self) -> None:
        super().__init__("relay", inbox=16)
        self.done = asyncio.Event()

    def handle(self, message: _Note) -> None:
        """Pass it on."""
        self.left -= 1
        if self.left <= 0:
            self.done.set()

    def settle(self) -> None:
        """One message a turn: each is a hop of the loop."""
        if self.left > 0:
            self.ref.tell(_Note())


def hop_cases(rates: MachineRates, repeats: int) -> Iterator[Case]:
    """One message from an actor to an actor. Floor: one callback of the loop."""

    async def relay() -> None:
        actor = _Relay()
        actor.left = MESSAGES
        async with anyio.create_task_group() as group:
            group.start_soon(actor.run)
            actor.ref.tell(_Note())
            await actor.done.wait()
            group.cancel_scope.cancel()

    seconds = best_s(lambda: asyncio.run(relay()), repeats=repeats) / MESSAGES
    yield Case(
        part="message hop",
        case="tell to handled",
        measured_s=seconds,
        floor_s=rates.hop_s,
        floor="one call_soon of asyncio",
    )


def detokenise_cases(rates: MachineRates, repeats: int) -> Iterator[Case]:
    """Text of a token in a stream. Floor: one Python call a token."""
    words = [(f" word{number}", f" word{number}".encode()) for number in range(1000)]
    pieces: list[str | bytes] = [text for text, _ in words]
    rng = random.Random(0)
    tokens = [rng.randrange(1000) for _ in range(TOKENS)]
    for stop in ((), ("STOP",)):

        def decode(stop: tuple[str, ...] = stop) -> None:
            stream = TextStream(PieceDecoder(pieces, strip_space=False), stop=stop, skip=frozenset())
            for token in tokens:
                stream.add(token)

        seconds = best_s(decode, repeats=repeats) / TOKENS
        case = "one token" + (", with a stop string" if stop else "")
        yield Case(part="detokenise", case=case, measured_s=seconds, floor_s=rates.call_s, floor="one Python call")


def sse_cases(rates: MachineRates, repeats: int) -> Iterator[Case]:
    """Bytes of one token's event. Floor: one Python call, and the bytes copied once."""
    head = StreamHead(
        id="chatcmpl-0123456789abcdef",
        created=0,
        model="model",
        fingerprint="fp",
        choices=1,
        prompts=1,
        include_usage=True,
        return_progress=False,
        reasoning_fields=(),
    )
    encoder = ChatChunkEncoder(head, lambda token: ("", b""))
    for batch in (1, 8):
        events = [TextDelta(" word", (1,)) for _ in range(batch)]
        size = len(encoder.encode(events))

        def encode(events: list[TextDelta] = events) -> None:
            encoder.encode(events)

        seconds = best_s(encode, repeats=repeats, inner=200)
        floor_s = rates.call_s + size / rates.host_bytes_s
        floor = f"one call and {size} bytes copied"
        yield Case(part="SSE encode", case=f"{batch} tokens at once", measured_s=seconds, floor_s=floor_s, floor=floor)
