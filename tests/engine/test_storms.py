"""Rows join, decode, leave, fail, are restored and discarded in any order; survivors say what they say alone.

Length classes are small, so that rows move between them; slots grow and shrink.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from mlx_troupe.runtime.messages.executor import Chunk, LeaveRow
from mlx_troupe.runtime.request import PLACEHOLDER

from .bench import Bench
from .conftest import LENGTHS, PAGE, prompt_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_troupe.runtime.engine.engine import MlxEngine

ARCHITECTURES = ["llama", "gemma3_text", "qwen3_next", "llama4"]
CACHE = {"llama"}
"""Of these, those whose KV can be cut into pages."""


class Spent:
    """A constraint that allows everything, and breaks after so many tokens."""

    def __init__(self, tokens: int, *, on_fill: bool) -> None:
        self.left, self.on_fill = tokens, on_fill

    def fill(self, words: Any) -> None:
        words[:] = 0xFFFFFFFF
        if self.on_fill and self.left == 0:
            raise RuntimeError("spent")

    def accept(self, token: int) -> None:
        self.left -= 1
        if not self.on_fill and self.left == 0:
            raise RuntimeError("spent")


class Storm(RuleBasedStateMachine):
    """See the module."""

    def __init__(self, engine: MlxEngine, expect: Callable[[list[int], int], list[int]], *, pages: bool) -> None:
        super().__init__()
        self.bench, self.expect, self.pages = Bench(engine), expect, pages
        self.kept: dict[tuple[int, ...], list[int]] = {}
        self.next_row = 0
        self.next_page = 1

    def number(self) -> int:
        self.next_row += 1
        return self.next_row

    @rule(lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=6), chunk=st.sampled_from([7, 16, 64]))
    def join(self, lengths: list[int], chunk: int) -> None:
        """Several rows in one plan, beside those that run."""
        rows = [(self.number(), prompt_of(length, seed=length)) for length in lengths]
        for row, prompt in rows:
            self.bench.stage(row, prompt, chunk=chunk)
        joins = tuple(self.bench.joining(row, prompt) for row, prompt in rows)
        self.bench.plan(joins=joins, discards=tuple(row for row, _ in rows))

    @rule(length=st.sampled_from(LENGTHS), copies=st.integers(2, 4))
    def join_copies(self, length: int, copies: int) -> None:
        """Rows of one prompt share what one of them has staged."""
        prompt = prompt_of(length)
        source = self.number()
        self.bench.stage(source, prompt)
        rows = [source, *(self.number() for _ in range(copies - 1))]
        self.bench.plan(joins=tuple(self.bench.joining(row, prompt, source=source) for row in rows), discards=(source,))

    @rule(tokens=st.integers(1, 5), on_fill=st.booleans(), length=st.sampled_from(LENGTHS))
    def join_doomed(self, tokens: int, on_fill: bool, length: int) -> None:
        row, prompt = self.number(), prompt_of(length)
        self.bench.stage(row, prompt)
        join = self.bench.joining(row, prompt, constraint=Spent(tokens, on_fill=on_fill))
        self.bench.plan(joins=(join,), discards=(row,))

    @rule()
    def join_unstaged(self) -> None:
        row = self.number()
        self.bench.plan(joins=(self.bench.joining(row, prompt_of(23)),))
        assert row in self.bench.failed

    @rule(length=st.sampled_from([17, 40]))
    def stage_and_discard(self, length: int) -> None:
        row = self.number()
        self.bench.stage(row, prompt_of(length))
        self.bench.plan(discards=(row,))

    @rule(count=st.integers(1, 24))
    def decode(self, count: int) -> None:
        self.bench.steps(count)

    @precondition(lambda self: self.bench.rows)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Any rows, one of them twice, and one that never was."""
        rows = data.draw(st.lists(st.sampled_from(self.bench.rows), min_size=1, unique=True))
        leaves = tuple(self.bench.leaving(row) for row in rows)
        self.bench.plan(leaves=(*leaves, leaves[0], LeaveRow(9999)))

    @precondition(lambda self: self.pages and self.bench.rows)
    @rule(data=st.data())
    def leave_pages(self, data: st.DataObject) -> None:
        self.bench.flush()  # a doomed row may end here
        if not self.bench.rows:
            return
        row = data.draw(st.sampled_from(self.bench.rows))
        known = self.bench.prompts[row] + [token for token in self.bench.tokens[row] if token != PLACEHOLDER]
        count = (len(known) - 1) // PAGE
        self.bench.leave(row, tuple(range(count)))
        ids = list(range(self.next_page, self.next_page + count))
        self.next_page += count
        assert self.bench.adopt(row, tuple(enumerate(ids))) == ()
        if count:
            self.kept[tuple(known[: count * PAGE + 1])] = ids

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        tokens = data.draw(st.sampled_from(sorted(self.kept)))
        use = data.draw(st.integers(1, len(tokens) - 1))
        row, prompt = self.number(), [*tokens[:use], *prompt_of(2)]
        pages = tuple(self.kept[tokens][: -(-use // PAGE)])
        assert self.bench.chunk(Chunk(row, tuple(prompt[use:-1]), use, pages, use)).error is None
        self.bench.plan(joins=(self.bench.joining(row, prompt),), discards=(row,))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.bench.engine.drop(tuple(self.kept.pop(data.draw(st.sampled_from(sorted(self.kept))))))

    @invariant()
    def whole(self) -> None:
        engine, bench = self.bench.engine, self.bench
        engine._batch.check_integrity()
        order = [row for row in engine._batch.order if row is not None]
        assert sorted(order) == sorted(bench.rows)
        assert not engine._staged
        assert not engine.shelf._aside
        assert set(engine._sampler._rows) == set(order)
        assert set(engine._constraints) <= set(order)

    def teardown(self) -> None:
        self.bench.flush()
        for row, said in self.bench.tokens.items():
            tokens = [token for token in said if token != PLACEHOLDER]
            assert tokens == self.expect(self.bench.prompts[row], len(tokens)), f"row {row}"
            assert len(tokens) == len(said) or row in self.bench.failed


def storm(architecture: str, new_engine: Any, solo: Any, overlap: str, chosen: settings) -> None:
    run_state_machine_as_test(
        lambda: Storm(
            new_engine(architecture, overlap), lambda p, n: solo(architecture, p, n), pages=architecture in CACHE
        ),
        settings=settings(
            chosen, deadline=None, suppress_health_check=list(HealthCheck), database=None, print_blob=True
        ),
    )


@pytest.mark.parametrize(
    ("architecture", "overlap"), [*((name, "launch") for name in ARCHITECTURES), ("llama", "build"), ("llama", "off")]
)
def test_membership_storm(architecture, overlap, new_engine, solo) -> None:
    storm(architecture, new_engine, solo, overlap, settings(max_examples=4, stateful_step_count=16, derandomize=True))


@pytest.mark.heavy
@pytest.mark.parametrize("overlap", ["launch", "build", "off"])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "deepseek_v3", "gpt_oss", "falcon_h1", "gemma3n", "mamba"])
def test_long_membership_storms(architecture, overlap, new_engine, solo) -> None:
    storm(architecture, new_engine, solo, overlap, settings(max_examples=10, stateful_step_count=40))
