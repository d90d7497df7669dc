"""The prefix tree: its invariants by name, and random use with an independent model of what may match."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_troupe.runtime.prefix_tree import PrefixMatch, PrefixTree

PAGE = 4


def make_tree(budget: int = 100) -> PrefixTree:
    return PrefixTree(page_tokens=PAGE, budget_pages=budget)


def test_match_is_token_exact() -> None:
    tree = make_tree()
    tokens = list(range(100, 112))
    added = tree.insert(tokens, 0, 3).added
    assert [index for index, _ in added] == [0, 1, 2]
    ids = [page for _, page in added]
    cases = [
        ([*tokens, 1], 12, (ids, 12)),
        (tokens, 11, (ids, 11)),
        ([*tokens[:9], 7, 7, 7], 11, (ids, 9)),
        (tokens[:8], 7, (ids[:2], 7)),
        (tokens[:5], 4, (ids[:1], 4)),
        ([*tokens[:3], 9, *tokens[4:]], 11, (ids[:1], 3)),
        ([9, *tokens], 11, ([], 0)),
        ([5], 0, ([], 0)),
        ([], 0, ([], 0)),
    ]
    for row, (prompt, limit, (pages, covered)) in enumerate(cases):
        assert tree.match(row, prompt, limit) == PrefixMatch(tuple(pages), covered)
    tree.check_integrity()


def test_match_takes_the_longest_slice_among_siblings() -> None:
    tree = make_tree()
    for tail in ([5, 6, 7, 8], [5, 6, 9, 9], [5, 1, 1, 1], [256, 0, 0, 0]):
        tree.insert([1, 2, 3, 4, *tail], 0, 2)
    found = tree.match(1, [1, 2, 3, 4, 5, 6, 9, 1, 2], 8)
    assert found.tokens == 7
    # Equal first bytes but another token: 256 and 0 share three of their four bytes.
    assert tree.match(2, [1, 2, 3, 4, 0, 0, 0, 0], 7).tokens == 4


def test_leased_pages_stay() -> None:
    tree = make_tree(budget=4)
    (_, first), (_, second) = tree.insert(list(range(8)), 0, 2).added
    tree.match(1, list(range(8)), 7)
    assert tree.leased_pages == 2
    assert tree.evict(10) == ()
    assert len(tree.insert(list(range(50, 66)), 0, 4).added) == 2, "the rest finds no room"
    assert tree.pages == 4
    tree.unlease(1)
    tree.unlease(1)
    assert set(tree.evict(10)) > {first, second}
    tree.check_integrity()


def test_a_second_match_of_a_row_replaces_its_lease() -> None:
    tree = make_tree()
    tree.insert(list(range(8)), 0, 2)
    tree.insert(list(range(50, 58)), 0, 2)
    tree.match(1, list(range(8)), 7)
    tree.match(1, list(range(50, 54)), 3)
    assert tree.leased_pages == 1
    tree.check_integrity()


def test_eviction_takes_leaves_first() -> None:
    tree = make_tree()
    old = [page for _, page in tree.insert(list(range(12)), 0, 3).added]
    new = [page for _, page in tree.insert(list(range(50, 58)), 0, 2).added]
    assert tree.evict(1) == (old[2],)
    tree.match(1, list(range(12)), 8)
    tree.unlease(1)
    assert tree.evict(2) == (new[1], new[0]), "least recently used first"
    assert tree.evict(9) == (old[1], old[0])
    assert tree.pages == 0
    tree.check_integrity()


def test_budget_is_never_exceeded() -> None:
    tree = make_tree(budget=3)
    assert [index for index, _ in tree.insert(list(range(20)), 0, 5).added] == [0, 1, 2]
    done = tree.insert(list(range(50, 58)), 0, 2)
    assert len(done.added) == len(done.evicted) == 2
    assert tree.pages == 3
    assert make_tree(budget=0).insert(list(range(8)), 0, 2).added == ()
    tree.check_integrity()


def test_duplicates_are_dropped_and_orphans_are_not_stored() -> None:
    tree = make_tree()
    tree.insert(list(range(8)), 0, 2)
    assert tree.insert(list(range(8)), 0, 2).added == ()
    assert [index for index, _ in tree.insert(list(range(12)), 0, 3).added] == [2]
    assert tree.insert(list(range(70, 82)), 2, 3).added == (), "the pages before it are not here"
    tree.check_integrity()


def test_forget_takes_all_that_hangs_below_even_if_leased() -> None:
    tree = make_tree()
    ids = [page for _, page in tree.insert(list(range(16)), 0, 4).added]
    tree.match(1, list(range(16)), 15)
    assert set(tree.forget([ids[1], 12345])) == set(ids[1:])
    assert tree.leased_pages == 1
    tree.check_integrity()
    tree.unlease(1)
    assert tree.evict(9) == (ids[0],)


def test_the_idle_heap_stays_small() -> None:
    tree = make_tree()
    tree.insert(list(range(8)), 0, 2)
    for _ in range(1000):
        tree.match(1, list(range(8)), 7)
        tree.unlease(1)
    assert len(tree._idle) < 100
    tree.check_integrity()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 12))
def test_random_use_keeps_integrity_and_finds_the_longest_prefix(seed: int, budget: int) -> None:
    rng = random.Random(seed)
    tree = make_tree(budget)
    held: dict[int, tuple[int, ...]] = {}
    for _ in range(60):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 21))]
        action = rng.randrange(6)
        if action <= 1:
            last = len(tokens) // PAGE
            first = rng.randrange(last + 1)
            done = tree.insert(tokens, first, last)
            for page in done.evicted:
                del held[page]
            for index, page in done.added:
                held[page] = tuple(tokens[: (index + 1) * PAGE])
        elif action <= 3:
            limit = len(tokens) - 1
            found = tree.match(rng.randrange(5), tokens, limit)
            best = max((common(page, tokens[:limit]) for page in held.values()), default=0)
            assert found.tokens == best
            assert all(common(held[page], tokens) >= min(len(held[page]), best) for page in found.pages)
        elif action == 4:
            tree.unlease(rng.randrange(5))
        elif held and rng.random() < 0.5:
            for page in tree.forget([rng.choice(list(held))]):
                del held[page]
        else:
            for page in tree.evict(rng.randrange(3)):
                del held[page]
        tree.check_integrity()
        assert set(held) == set(tree._pages)


def common(first: tuple[int, ...], second: list[int]) -> int:
    """Length of the longest common start."""
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length
