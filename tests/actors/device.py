"""A simulated device: it counts what the fake engine holds, by rules of its own, and never lets it pass the line.

Rows lie in buffers with a cursor that moves, as the real ones do; a step that needs larger buffers holds the old ones
too. What a chunk needs while it runs is drawn at random, up to twice what the formula of the runtime says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlx_troupe.runtime.kv_estimate import KVKind, KVLayout, room_for, round_up, slots_for, transient_bytes

if TYPE_CHECKING:
    import random

    from mlx_troupe.runtime.messages.executor import Chunk
    from tests.fake_engine import FakeEngine

TOKEN_BYTES = 64
GRAIN = 256


@dataclass
class Buffers:
    """Buffers of one length class."""

    slots: int = 0
    capacity: int = 0
    cursor: int = 0
    idle_steps: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.slots * self.capacity * TOKEN_BYTES


@dataclass
class Device:
    """Memory of one device.

    Attributes:
        line_bytes: passing it is the end.
        random: draws transients.
        base_bytes: weights.
        dearer: the most that a transient is of what the formula says.
    """

    line_bytes: int
    random: random.Random
    base_bytes: int = 100_000
    dearer: float = 2.0
    classes: tuple[int, ...] = (64, 256, 1024)
    peak_bytes: int = 0
    layout: KVLayout = field(init=False)
    buffers: dict[int, Buffers] = field(default_factory=dict)
    rooms: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = KVLayout(
            kinds=(KVKind(None, TOKEN_BYTES),), classes=self.classes, activation_bytes=500.0, score_bytes=2.0
        )

    def active_bytes(self, engine: FakeEngine) -> int:
        """What is held now."""
        staged = sum(max(round_up(len(kv), GRAIN), self.rooms.get(row, 0)) for row, kv in engine.staged.items())
        aside = sum(len(pages) for pages in engine.aside.values()) * engine.page_tokens
        pages = len(engine.pages) * engine.page_tokens
        rows = sum(buffers.nbytes for buffers in self.buffers.values())
        return self.base_bytes + rows + (staged + aside + pages) * TOKEN_BYTES

    def settle(self, engine: FakeEngine) -> None:
        """Rows have joined and left."""
        homes = self._homes(engine)
        for bound in [bound for bound in self.buffers if bound not in homes]:
            del self.buffers[bound]
        for bound, lengths in homes.items():
            buffers = self.buffers.setdefault(bound, Buffers())
            wanted = slots_for(len(lengths))
            buffers.idle_steps = buffers.idle_steps + 1 if wanted < buffers.slots else 0
            shrinks = buffers.idle_steps >= 16
            slots = wanted if shrinks else max(wanted, buffers.slots)
            self._change(engine, buffers, slots, max(lengths), tokens=1)

    def step(self, engine: FakeEngine) -> int:
        """All rows have got one token; returns what is held."""
        for bound, lengths in self._homes(engine).items():
            buffers = self.buffers.setdefault(bound, Buffers())
            buffers.cursor += 1
            self._change(engine, buffers, max(buffers.slots, slots_for(len(lengths))), max(lengths), tokens=1)
        active = self.active_bytes(engine)
        self._check(active, "a step")
        return active

    def chunks(self, engine: FakeEngine, chunks: tuple[Chunk, ...]) -> list[int]:
        """Chunks run in one forward; returns the transient of each, which is all of it where there is one."""
        tokens, depth = sum(len(chunk.tokens) for chunk in chunks), max(chunk.start for chunk in chunks)
        transient = int(transient_bytes(self.layout, tokens, depth) * self.random.uniform(0.0, self.dearer))
        used = self.active_bytes(engine) + transient
        self.rooms = {row: room for row, room in self.rooms.items() if row in engine.staged}
        for chunk in chunks:
            kv = engine.staged.get(chunk.row, ())
            held = max(round_up(len(kv), GRAIN), self.rooms.get(chunk.row, 0))
            room = max(held, round_up(len(chunk.tokens), GRAIN) if not chunk.start else room_for(chunk.target))
            self.rooms[chunk.row] = room
            used += (room - held) * TOKEN_BYTES
        self._check(used, f"chunks of {tokens} tokens at {depth}")
        return [transient if len(chunks) == 1 else 0] * len(chunks)

    def _homes(self, engine: FakeEngine) -> dict[int, list[int]]:
        homes: dict[int, list[int]] = {}
        for row in engine.rows.values():
            length = len(row.kv)
            bound = next((bound for bound in self.classes if length + min(256, bound // 4) <= bound), self.classes[-1])
            homes.setdefault(bound, []).append(length)
        return homes

    def _change(self, engine: FakeEngine, buffers: Buffers, slots: int, longest: int, *, tokens: int) -> None:
        """Make buffers that hold this; the old ones exist until the new ones do."""
        capacity, cursor = buffers.capacity, max(buffers.cursor, longest)
        if cursor + tokens > capacity:
            cursor = longest
            capacity = room_for(longest)
        elif slots > buffers.slots:
            cursor, capacity = longest, room_for(longest)
        if (slots, capacity) != (buffers.slots, buffers.capacity):
            self._check(self.active_bytes(engine) + slots * capacity * TOKEN_BYTES, "larger buffers")
        buffers.slots, buffers.capacity, buffers.cursor = slots, capacity, cursor

    def _check(self, used_bytes: int, what: str) -> None:
        self.peak_bytes = max(self.peak_bytes, used_bytes)
        if used_bytes > self.line_bytes:
            raise MemoryError(f"{what} took {used_bytes} bytes, {self.line_bytes} there are")
