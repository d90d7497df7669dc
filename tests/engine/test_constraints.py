"""Invariant 6: constrained rows sample in the batch, only their sample waits, and a failing one ends its own row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mlx_troupe.runtime.messages.executor import StepPlan
from mlx_troupe.runtime.request import PLACEHOLDER
from mlx_troupe.runtime.sampling_params import SamplingParams

from .bench import Bench
from .conftest import VOCAB, prompt_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

OVERLAPS = ["launch", "build", "off"]
PROMPTS = [prompt_of(length) for length in (23, 5, 40)]


class Menu:
    """Allows, after n accepted tokens, the ids that `dish(n)` names; checks that it is asked in order.

    Args:
        log: where calls are noted, if anywhere.
        fail_fill, fail_accept: number of the call that raises.
    """

    def __init__(
        self,
        dish: Callable[[int], set[int]],
        *,
        log: list[str] | None = None,
        fail_fill: int | None = None,
        fail_accept: int | None = None,
    ) -> None:
        self.dish, self.log = dish, [] if log is None else log
        self.fail_fill, self.fail_accept = fail_fill, fail_accept
        self.taken: list[int] = []
        self.filled = 0

    def fill(self, words: np.ndarray) -> None:
        self.log.append("fill")
        assert words.shape == (-(-VOCAB // 32),)
        assert words.dtype.name == "uint32"
        assert self.filled == len(self.taken), "filled before the last token was accepted"
        if self.filled == self.fail_fill:
            raise RuntimeError("fill broke")
        self.filled += 1
        for token in self.dish(len(self.taken)):
            words[token // 32] |= 1 << (token % 32)

    def accept(self, token: int) -> None:
        self.log.append(f"accept {token}")
        assert token in self.dish(len(self.taken))
        if len(self.taken) == self.fail_accept:
            raise RuntimeError("accept broke")
        self.taken.append(token)


def by_turn(turn: int) -> set[int]:
    """Three ids, others each turn; the first ids of a word and the last are among them."""
    return {turn * 31 % VOCAB, (turn * 57 + 32) % VOCAB, (turn * 91 + 63) % VOCAB}


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_next", "llama4"])
def test_invariant_6_tokens_respect_the_masks_and_neighbours_do_not_notice(
    architecture, overlap, new_engine, solo
) -> None:
    bench = Bench(new_engine(architecture, overlap))
    menu = Menu(by_turn)
    bench.join(0, PROMPTS[0])
    bench.join(1, PROMPTS[1], constraint=menu)
    bench.join(2, PROMPTS[2])
    bench.steps(25)
    bench.flush()
    assert all(token in by_turn(turn) for turn, token in enumerate(bench.tokens[1]))
    assert bench.tokens[1] == menu.taken
    assert len(set(bench.tokens[1])) > 5
    for row in (0, 2):
        assert bench.tokens[row] == solo(architecture, PROMPTS[row], len(bench.tokens[row]))


def test_invariant_6_the_same_tokens_whatever_the_overlap(new_engine) -> None:
    """A constrained row that samples, with a seed, beside a plain one."""
    found = []
    for overlap in OVERLAPS:
        bench = Bench(new_engine("llama", overlap))
        bench.join(0, PROMPTS[0])
        sampling = SamplingParams(temperature=1.0, seed=5)
        bench.join(1, PROMPTS[1], constraint=Menu(lambda turn: set(range(turn, 500))), sampling=sampling)
        bench.steps(20)
        bench.flush()
        found.append(bench.tokens)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("overlap", ["launch", "build"])
def test_invariant_6_only_the_sample_waits(overlap, new_engine, monkeypatch) -> None:
    """The forward is submitted, the step before is committed, masks are filled, then sampling is submitted."""
    bench = Bench(new_engine("llama", overlap))
    bench.join(0, PROMPTS[0])
    bench.join(1, PROMPTS[1], constraint=Menu(by_turn, log=bench.log))
    bench.steps(3)
    log = bench.watch(monkeypatch)
    step = bench.plan()
    kinds = [entry.split()[0] for entry in log]
    launch = {
        "launch": ["forward", "submit", "read", "accept", "commit", "fill", "sample", "submit"],
        "build": ["forward", "read", "submit", "read", "accept", "commit", "fill", "sample", "submit"],
    }
    assert kinds == launch[overlap]
    assert f"commit {step - 1}" in log


def test_invariant_6_unconstrained_batches_do_not_wait(new_engine, monkeypatch) -> None:
    """Once the last constrained row has left, tokens are read after the next launch again."""
    bench = Bench(new_engine())
    bench.join(0, PROMPTS[0])
    bench.join(1, PROMPTS[1], constraint=Menu(by_turn))
    bench.steps(3)
    bench.leave(1)
    bench.plan()
    log = bench.watch(monkeypatch)
    bench.plan()
    assert [entry.split()[0] for entry in log] == ["forward", "sample", "submit", "read", "commit"]


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("fault", [{"fail_fill": 4}, {"fail_accept": 4}, {"fail_fill": 0}, {"fail_accept": 0}], ids=str)
def test_invariant_6_a_failing_constraint_ends_only_its_row(fault, overlap, new_engine, solo) -> None:
    bench = Bench(new_engine("llama", overlap))
    broken, sound = Menu(by_turn, **fault), Menu(by_turn)
    bench.join(0, PROMPTS[0])
    bench.join(1, PROMPTS[1], constraint=broken)
    bench.join(2, PROMPTS[2], constraint=sound)
    for _ in range(12):
        bench.plan()
    bench.flush()
    assert list(bench.failed) == [1]
    assert "broke" in bench.failed[1]
    tokens = [token for token in bench.tokens[1] if token != PLACEHOLDER]
    assert len(tokens) == fault.get("fail_fill", fault.get("fail_accept", 0) + 1)
    assert bench.tokens[2] == sound.taken
    assert len(sound.taken) > 10
    assert bench.tokens[0] == solo("llama", PROMPTS[0], len(bench.tokens[0]))
    assert bench.engine._batch.order.count(None) >= 0
    assert 1 not in bench.engine._batch.order
    bench.engine._batch.check_integrity()


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("fault", [{"fail_fill": 3}, {"fail_accept": 3}], ids=str)
def test_invariant_6_the_engine_lives_on_when_all_rows_failed(fault, overlap, new_engine, solo) -> None:
    bench = Bench(new_engine("llama", overlap))
    bench.join(1, PROMPTS[1], constraint=Menu(by_turn, **fault))
    for _ in range(6):
        bench.rows = [1]  # decode may not have heard yet
        bench.plan()
    bench.rows = []
    assert list(bench.failed) == [1]
    bench.join(2, PROMPTS[2])
    bench.steps(5)
    bench.flush()
    assert bench.tokens[2] == solo("llama", PROMPTS[2], 6)
    assert bench.tokens[1].count(PLACEHOLDER) + fault.get("fail_fill", 4) >= len(bench.tokens[1])


def test_a_mask_without_any_token_ends_the_row(new_engine) -> None:
    bench = Bench(new_engine())
    bench.join(0, PROMPTS[0])
    bench.join(1, PROMPTS[1], constraint=Menu(lambda turn: set() if turn == 2 else {7}))
    bench.steps(5)
    assert "allows no token" in bench.failed[1]
    assert list(bench.failed) == [1]


def test_bits_beyond_the_vocabulary_are_no_tokens(new_engine) -> None:
    """510 ids do not fill their last word: a constraint that allows only the rest of it allows nothing."""
    import msgspec

    engine = new_engine()
    engine.facts = msgspec.structs.replace(engine.facts, vocab_size=VOCAB - 2)
    failed: list[object] = []
    engine._constraints = {3: Menu(lambda turn: {VOCAB - 2, VOCAB - 1}), 4: Menu(lambda turn: {VOCAB - 3, VOCAB - 1})}
    allowed = engine._allowed([4, None, 3], StepPlan(1), failed.append)
    assert allowed[0, -1].item() == 1 << 29
    assert [(message.rows, message.error) for message in failed] == [
        ((3,), "ValueError: the constraint allows no token")
    ]


def test_a_fault_beside_a_constraint_leaves_nothing_behind(new_engine, solo, monkeypatch) -> None:
    """The sampler raises in the step in which a constraint failed: all rows end, and the next ones run."""
    bench = Bench(new_engine())
    bench.join(0, PROMPTS[0])
    bench.join(1, PROMPTS[1], constraint=Menu(by_turn, fail_fill=2))
    with monkeypatch.context() as patch:
        bench.steps(1)
        patch.setattr(bench.engine._sampler, "sample", lambda *args, **kwargs: 1 / 0)
        bench.plan()
    assert set(bench.failed) == {0, 1}
    bench.join(2, PROMPTS[2])
    bench.steps(4)
    bench.flush()
    assert bench.tokens[2] == solo("llama", PROMPTS[2], 5)
