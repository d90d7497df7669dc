"""Rows in a Batch, driven by hand: join, decode greedily, verify drafts and rewind, leave; compared with rows alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .steps import staged_row

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable

    from mlx_troupe.runtime.engine.kv.batch import Batch

WRONG = 11
"""A draft token no tiny model picks twice in a row."""


class Rows:
    """A batch and what its rows have said so far.

    Args:
        expect: (prompt, count) to the tokens of a row alone.
    """

    def __init__(self, model: Any, batch: Batch, expect: Callable[[list[int], int], list[int]]) -> None:
        self.model = model
        self.batch = batch
        self.expect = expect
        self.prompts: dict[int, list[int]] = {}
        self.outputs: dict[int, list[int]] = {}
        self.alive: list[int] = []

    def join(self, row: int, prompt: list[int], *, chunk: int = 16) -> None:
        """Prefill a row alone and let it in."""
        self.batch.join(row, staged_row(self.model, prompt, chunk=chunk))
        self.prompts[row], self.outputs[row] = prompt, []
        self.alive.append(row)

    def leave(self, row: int) -> None:
        self.batch.leave(row)
        self.alive.remove(row)

    def step(self, count: int = 1) -> None:
        """Decode `count` tokens a row, one at a time."""
        for _ in range(count):
            order = self.batch.order
            logits = self.batch.forward(mx.array([[self._last(row)] for row in order]))[:, -1]
            for row, token in zip(order, mx.argmax(logits, axis=-1).tolist(), strict=True):
                if row is not None:
                    self.outputs[row].append(token)

    def refeed(self, row: int, count: int) -> None:
        """Take back a row's newest tokens, prompt or not, and feed them again while the others decode on."""
        fed = (self.prompts[row] + self.outputs[row])[: self.batch.length(row)][-count:]
        self.batch.rewind({row: count})
        for token in fed:
            self.feed({row: token})

    def feed(self, tokens: dict[int, int]) -> None:
        """One forward in which these rows get these tokens, and nobody asks what they say; the others decode."""
        order = self.batch.order
        inputs = [self._last(row) if row not in tokens else tokens[row] for row in order]
        logits = self.batch.forward(mx.array([[token] for token in inputs]))[:, -1]
        for row, found in zip(order, mx.argmax(logits, axis=-1).tolist(), strict=True):
            if row is not None and row not in tokens:
                self.outputs[row].append(found)

    def speculate(self, rng: random.Random, drafts: int = 3) -> None:
        """Verify drafts of which a random number is right, and take back the rest."""
        self.verify({row: rng.randint(0, drafts) for row in self.alive}, drafts)

    def verify(self, right: dict[int, int], drafts: int = 3) -> None:
        """One forward over the last token and `drafts` drafts a row, of which the first `right[row]` are right."""
        self.batch.checkpoint()
        order = self.batch.order
        block = [self._draft(row, right, drafts) for row in order]
        found = mx.argmax(self.batch.forward(mx.array(block)), axis=-1).tolist()
        counts: dict[int, int] = {}
        for row, fed, tokens in zip(order, block, found, strict=True):
            if row is not None:
                accepted = next((i for i in range(drafts) if fed[i + 1] != tokens[i]), drafts)
                self.outputs[row] += tokens[: accepted + 1]
                counts[row] = drafts - accepted
        self.batch.rewind(counts)

    def _draft(self, row: int | None, right: dict[int, int], drafts: int) -> list[int]:
        if row is None:
            return [0] * (drafts + 1)
        done = len(self.outputs[row])
        known = self.expect(self.prompts[row], done + drafts)[done:]
        return [self._last(row), *known[: right[row]], *[WRONG] * (drafts - right[row])]

    def _last(self, row: int | None) -> int:
        if row is None:
            return 0
        return (self.prompts[row] + self.outputs[row])[-1]

    def check(self, rows: Iterable[int] | None = None) -> None:
        """Integrity, lengths, and every row so far as alone."""
        self.batch.check_integrity()  # type: ignore[attr-defined]
        for row in self.outputs if rows is None else rows:
            said = self.outputs[row]
            assert said == self.expect(self.prompts[row], len(said)), f"row {row}"
        for row in self.alive:
            assert self.batch.length(row) == len(self.prompts[row]) - 1 + len(self.outputs[row]), f"row {row}"
