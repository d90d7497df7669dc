"""The choice of chunks as pure functions: order, size, company, and the cost model behind them."""

from __future__ import annotations

import random

import pytest

from mlx_troupe.actors.prefill_cost import ChunkCost
from mlx_troupe.actors.prefill_policy import (
    FLOOR_TOKENS,
    IDLE_FLOOR_TOKENS,
    PATIENCE_S,
    SHORT_S,
    PrefillPolicy,
    Prompt,
    choose,
    chunk_tokens,
    in_order,
    owed_s,
)
from tests.actors.parts import make_rows
from tests.fake_engine import Costs

POLICY = PrefillPolicy(chunk_tokens=2048, stall_target_s=0.5, fair_share=0.3)


def fixed_cost(token_s: float, depth_s: float = 0.0) -> ChunkCost:
    cost = ChunkCost(token_s)
    cost.base_s, cost.depth_s = token_s, depth_s
    return cost


def prompt_of(tokens: int, *, computed: int = 0, served_s: float = 0.0, first: int = 0) -> Prompt:
    """A prompt with `tokens` to compute, whose first page is unlike any other's unless `first` is equal."""
    rows = make_rows([first or random.Random(tokens).randrange(1 << 20), *range(tokens)])
    prompt = Prompt(rows, served_s, 256)
    prompt.computed = computed
    return prompt


# --- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("token_s", "depth_s"), [(1e-4, 0.0), (1e-4, 1e-8), (3e-3, 8e-6), (2e-6, 1e-10)])
@pytest.mark.parametrize("depth", [0, 1000, 30_000])
@pytest.mark.parametrize("seconds", [0.05, 0.5])
def test_tokens_within_is_the_inverse_of_seconds(token_s: float, depth_s: float, depth: int, seconds: float) -> None:
    cost = fixed_cost(token_s, depth_s)
    tokens = cost.tokens_within(seconds, depth)
    assert cost.seconds(tokens, depth) <= seconds * (1 + 1e-9)
    assert cost.seconds(tokens + 1, depth) > seconds


@pytest.mark.parametrize("seed_s", [0.0, 1e-4, 2e-2], ids=["unknown", "too_low", "too_high"])
def test_the_model_learns_the_cost_at_depth(seed_s: float) -> None:
    """SmolLM2 on a CPU, roughly: 3 ms a token at depth 0, 15 ms at 1,536 (DESIGN section 6)."""
    truth = Costs(token_s=3e-3, depth_s=8e-6)
    noise = random.Random(1)
    cost = ChunkCost(seed_s)
    depth = 0
    for _ in range(30):
        tokens = max(FLOOR_TOKENS, cost.tokens_within(0.5, depth))
        seconds = truth.chunk(tokens, depth)
        cost.observe(tokens, depth, seconds * noise.uniform(0.9, 1.1))
        depth = (depth + tokens) % 4096
    for depth in (0, 1500, 4000):
        tokens = cost.tokens_within(0.5, depth)
        assert truth.chunk(tokens, depth) == pytest.approx(0.5, rel=0.3)


def test_the_stall_target_is_met_after_a_few_chunks_of_one_prompt() -> None:
    truth = Costs(token_s=3e-3, depth_s=8e-6)
    cost = ChunkCost(3e-3)
    depth, seconds = 0, []
    while depth < 3500:
        tokens = chunk_tokens(prompt_of(3500, computed=depth), cost, POLICY, contended=True)
        seconds.append(truth.chunk(tokens, depth))
        cost.observe(tokens, depth, seconds[-1])
        depth += tokens
    assert max(seconds[2:]) < 0.6
    assert sum(seconds[2:-1]) / len(seconds[2:-1]) == pytest.approx(0.5, rel=0.15)


def test_the_model_stays_non_negative_and_survives_an_outlier() -> None:
    cost = ChunkCost(1e-4)
    for depth in range(0, 20_000, 500):
        cost.observe(500, depth, 500 * 2e-4)
    before = cost.tokens_within(0.5, 4000)
    cost.observe(500, 4000, 30.0)
    for _ in range(20):
        cost.observe(500, 4000, 500 * 2e-4)
        assert cost.base_s >= 0.0
        assert cost.depth_s >= 0.0
    assert cost.tokens_within(0.5, 4000) == pytest.approx(before, rel=0.2)


def test_a_cost_that_falls_with_depth_is_taken_as_flat() -> None:
    cost = ChunkCost()
    for depth, token_s in [(0, 4e-4), (4096, 1e-4), (8192, 1e-4), (0, 4e-4)] * 5:
        cost.observe(512, depth, 512 * token_s)
        assert cost.base_s >= 0.0
        assert cost.depth_s >= 0.0


def test_nothing_is_learnt_from_nothing() -> None:
    cost = ChunkCost(1e-3)
    cost.observe(0, 10, 1.0)
    cost.observe(10, 10, 0.0)
    assert cost.seconds(100, 0) == pytest.approx(0.1, rel=0.02)


# --- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remaining", "token_s", "contended", "tokens"),
    [
        (5000, 1e-5, False, 2048),
        (100, 1e-5, False, 100),
        (5000, 1e-5, True, 2048),
        (5000, 1e-3, True, 500),
        (5000, 1e-3, False, 2000),
        (5000, 1.0, True, FLOOR_TOKENS),
        (5000, 1.0, False, IDLE_FLOOR_TOKENS),
        (9, 1.0, True, 9),
        (0, 1e-3, True, 0),
    ],
)
def test_chunk_tokens(remaining: int, token_s: float, contended: bool, tokens: int) -> None:
    assert chunk_tokens(prompt_of(remaining), fixed_cost(token_s), POLICY, contended=contended) == tokens


def test_chunks_shrink_with_depth() -> None:
    cost = fixed_cost(3e-3, 8e-6)
    sizes = [chunk_tokens(prompt_of(9000, computed=depth), cost, POLICY, contended=True) for depth in (0, 1536, 6000)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < sizes[0] / 4


@pytest.mark.parametrize(("chunk_s", "contended", "owed"), [(0.5, True, 0.15), (0.5, False, 0.0), (0.0, True, 0.0)])
def test_owed(chunk_s: float, contended: bool, owed: float) -> None:
    assert owed_s(POLICY, chunk_s, contended=contended) == pytest.approx(owed)


# --- order ------------------------------------------------------------------------------------------------------------


def test_shortest_remaining_time_first() -> None:
    cost = fixed_cost(1e-3, 1e-6)
    long, short, almost = prompt_of(5000), prompt_of(50), prompt_of(6000, computed=5980)
    deep = prompt_of(20_000, computed=19_950)  # as many tokens as `short`, but deep
    assert in_order([long, short, almost, deep], cost, now_s=0.0) == [short, almost, deep, long]


def test_equal_prompts_go_in_the_order_of_admission() -> None:
    prompts = [prompt_of(100) for _ in range(4)]
    assert in_order(prompts, fixed_cost(1e-3), now_s=0.0) == prompts


@pytest.mark.parametrize(("waited_s", "first"), [(PATIENCE_S - 0.1, "short"), (PATIENCE_S, "long")])
def test_the_oldest_goes_first_when_it_has_waited_too_long(waited_s: float, first: str) -> None:
    long, short = prompt_of(5000), prompt_of(50, served_s=waited_s)
    order = in_order([long, short], fixed_cost(1e-3), now_s=waited_s)
    assert order[0] is (long if first == "long" else short)


def test_only_the_oldest_has_patience_to_lose() -> None:
    """Else many long prompts, all late, would shut short ones out."""
    prompts = [prompt_of(5000, served_s=9.0), prompt_of(6000), prompt_of(50, served_s=9.0)]
    assert in_order(prompts, fixed_cost(1e-3), now_s=10.0)[0] is prompts[2]


def test_no_prompts_no_order() -> None:
    assert in_order([], fixed_cost(1.0), 0.0) == []
    assert choose([], fixed_cost(1.0), POLICY, contended=True) == []


# --- company ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("contended", "count"), [(True, 5), (False, 32)])
def test_short_prompts_go_together(contended: bool, count: int) -> None:
    prompts = [prompt_of(10, first=index + 1) for index in range(32)]
    chosen = choose(prompts, fixed_cost(1e-3), POLICY, contended=contended)
    assert [prompt for prompt, _ in chosen] == prompts[:count]
    assert all(tokens == 10 for _, tokens in chosen)
    assert count * 10 * 1e-3 <= (SHORT_S if contended else POLICY.stall_target_s)


def test_a_long_chunk_goes_alone() -> None:
    prompts = [prompt_of(5000), prompt_of(10)]
    chosen = choose(prompts, fixed_cost(1e-3), POLICY, contended=True)
    assert [(prompt.target, tokens) for prompt, tokens in chosen] == [(5000, 500)]


def test_company_is_whole_prompts_only() -> None:
    prompts = [prompt_of(10), prompt_of(5000), prompt_of(20)]
    chosen = choose(prompts, fixed_cost(1e-3), POLICY, contended=True)
    assert [prompt.target for prompt, _ in chosen] == [10, 20]


def test_of_prompts_that_start_alike_one_goes_first() -> None:
    alike = [prompt_of(300, first=7) for _ in range(3)]
    other = prompt_of(300, first=8)
    chosen = choose([*alike, other], fixed_cost(1e-5), POLICY, contended=False)
    assert [prompt for prompt, _ in chosen] == [alike[0], other]
    alike[1].computed = alike[2].computed = 256  # once restored they have no reason to wait
    assert len(choose([*alike, other], fixed_cost(1e-5), POLICY, contended=False)) == 4
