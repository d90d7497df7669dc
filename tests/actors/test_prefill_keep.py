"""What is kept of a prompt, where its forward is split, and who waits for whom."""

from __future__ import annotations

import pytest

from mlx_troupe.actors.prefill_keep import LEAST_BYTES, KeepPlan, KeepRules, keep_plan, spacing_pages
from mlx_troupe.actors.prefill_policy import FRESHNESS_S, Prompt, fresh
from tests.actors.parts import make_rows

PLAIN = KeepRules(16)
STATEFUL = KeepRules(16, checkpoints=True, spacing_pages=2, cut_tokens=16)


@pytest.mark.parametrize(
    ("target", "ends"),
    [(0, ()), (1, (1,)), (15, (15,)), (16, (16,)), (17, (16, 17)), (40, (16, 32, 40)), (48, (16, 32, 48))],
)
def test_plain_prompts_keep_pages_and_a_tail(target, ends) -> None:
    assert keep_plan(PLAIN, target, None, 0, cached=True) == KeepPlan((), ends)
    assert keep_plan(PLAIN, target, 3, 0, cached=True) == KeepPlan((), ends), "a turn's start means nothing here"


def test_a_short_tail_is_not_worth_keeping() -> None:
    assert keep_plan(KeepRules(256), 260, None, 0, cached=True).ends == (256,)
    assert keep_plan(KeepRules(256), 272, None, 0, cached=True).ends == (256, 272)


def test_checkpoints_are_spaced_and_lie_at_the_turn_or_the_end() -> None:
    plan = keep_plan(STATEFUL, 100, None, 0, cached=True)
    assert plan.ends == (16, 32, 48, 64, 80, 96, 100)
    assert plan.checkpoints == {32, 64, 96, 100}
    turn = keep_plan(STATEFUL, 100, 90, 0, cached=True)
    assert turn.checkpoints == {32, 64, 90, 96}
    assert 90 in turn.cuts


def test_a_branch_gets_a_checkpoint() -> None:
    assert keep_plan(STATEFUL, 100, None, 48, cached=True).checkpoints == {32, 48, 64, 96, 100}


@pytest.mark.parametrize("turn_start", [None, 50, 100])
def test_forward_boundaries_are_the_same_with_cache_on_and_off(turn_start) -> None:
    on = keep_plan(STATEFUL, 100, turn_start, 0, cached=True)
    off = keep_plan(STATEFUL, 100, turn_start, 0, cached=False)
    unkept = keep_plan(KeepRules(0, True, 2, 16), 100, turn_start, 0, cached=True)
    assert on.cuts == off.cuts == unkept.cuts
    assert set(range(16, 100, 16)) <= set(on.cuts)
    assert all(point in (*on.cuts, 100) for point in on.checkpoints), "a checkpoint adds no boundary"
    assert off.ends == unkept.ends == ()


@pytest.mark.parametrize(
    ("page_bytes", "checkpoint_bytes", "pages"),
    [(0, 1, 1), (0, LEAST_BYTES, 1), (0, LEAST_BYTES + 1, 2), (10 * LEAST_BYTES, 60 * LEAST_BYTES, 3)],
)
def test_spacing_follows_the_budget_of_bytes(page_bytes, checkpoint_bytes, pages) -> None:
    assert spacing_pages(page_bytes, checkpoint_bytes) == pages


def prompts(*tokens: list[int], namespaces: tuple[str, ...] = ("", "", "")) -> list[Prompt]:
    """Prompts that asked the cache and got nothing."""
    found = []
    for prompt, namespace in zip(tokens, namespaces, strict=False):
        made = Prompt(make_rows(prompt, namespace=namespace), 0.0, 4)
        made.matched = 0
        found.append(made)
    return found


SHARED = list(range(40))


def test_a_prompt_waits_for_one_that_computes_what_it_needs() -> None:
    first, second = prompts([*SHARED, 1, 2], [*SHARED, 3])
    assert fresh([first, second], 1.0) == [first], "of two that have not begun the one admitted first goes"
    first.matched, first.computed = None, 8
    assert fresh([first, second], 1.0) == [first]
    assert fresh([first, second], FRESHNESS_S) == [first, second], "not for ever"
    first.computed = 36
    assert fresh([first, second], 1.0) == [first, second], "what is left is less than a third"


def test_a_prompt_does_not_wait_for_little_or_for_another_salt() -> None:
    little = prompts([*SHARED[:8], 1], [*SHARED[:8], *range(100, 140)])
    assert fresh(little, 1.0) == little
    salted = prompts([*SHARED, 1], [*SHARED, 1], namespaces=("a", "b"))
    assert fresh(salted, 1.0) == salted


def test_a_prompt_that_has_begun_goes_on() -> None:
    first, second = prompts([*SHARED, 1, 2], [*SHARED, 3])
    second.matched, second.computed = None, 4
    assert second in fresh([first, second], 1.0)
