"""The cache-store's core: what it tells the engine and prefill."""

from __future__ import annotations

from mlx_troupe.actors.cache_store import CacheStoreCore
from mlx_troupe.runtime.messages.cache_store import Match, Store
from mlx_troupe.runtime.messages.executor import AdoptPages, DropPages
from mlx_troupe.runtime.messages.prefill import Matched

TOKENS = tuple(range(100, 112))


def make_core(budget_pages: int = 10) -> CacheStoreCore:
    return CacheStoreCore(page_tokens=4, page_bytes=100, budget_bytes=100 * budget_pages + 99)


def test_a_match_leaves_the_last_token_to_decode() -> None:
    core = make_core()
    core.store(Store(1, TOKENS, 0, 3))
    core.match(Match(2, TOKENS))
    assert core.to_prefill == [Matched(2, (1, 2, 3), 11)]
    assert (core.queried_tokens, core.hit_tokens) == (11, 11)
    assert core.held_bytes == 300


def test_every_store_is_followed_by_an_adoption_that_frees_the_rest() -> None:
    core = make_core()
    core.store(Store(1, TOKENS[:8], 0, 2))
    core.store(Store(2, TOKENS, 0, 3))
    core.store(Store(3, TOKENS, 0, 3))
    assert core.to_executor == [
        AdoptPages(1, ((0, 1), (1, 2))),
        AdoptPages(2, ((0, 0), (1, 0), (2, 3))),
        AdoptPages(3, ((0, 0), (1, 0), (2, 0))),
    ]


def test_evicted_pages_are_dropped_before_new_ones_are_named() -> None:
    core = make_core(budget_pages=2)
    core.store(Store(1, TOKENS[:8], 0, 2))
    core.to_executor.clear()
    core.store(Store(2, tuple(range(8)), 0, 2))
    drop, adopt = core.to_executor
    assert isinstance(drop, DropPages)
    assert set(drop.pages) == {1, 2}
    assert adopt == AdoptPages(2, ((0, 3), (1, 4)))
    assert core.evicted_pages == 2


def test_lost_pages_go_with_all_behind_them() -> None:
    core = make_core()
    core.store(Store(1, TOKENS, 0, 3))
    core.to_executor.clear()
    core.lost((2,))
    (drop,) = core.to_executor
    assert isinstance(drop, DropPages)
    assert set(drop.pages) == {2, 3}
    core.lost((2,))
    assert len(core.to_executor) == 1
    core.match(Match(2, TOKENS))
    assert core.to_prefill == [Matched(2, (1,), 4)]


def test_reclaim_frees_whole_pages_that_nobody_leases() -> None:
    core = make_core()
    core.store(Store(1, TOKENS, 0, 3))
    core.match(Match(2, TOKENS[:5]))
    core.reclaim(101)
    assert core.tree.pages == 1
    core.reclaim(10_000)
    assert core.tree.pages == 1
    core.unlease(2)
    core.reclaim(1)
    assert core.held_bytes == 0


def test_a_model_without_pages_keeps_nothing() -> None:
    core = CacheStoreCore(page_tokens=4, page_bytes=0, budget_bytes=1000)
    core.store(Store(1, TOKENS, 0, 3))
    core.match(Match(2, TOKENS))
    core.reclaim(5)
    assert core.to_executor == [AdoptPages(1, ((0, 0), (1, 0), (2, 0)))]
    assert core.to_prefill == [Matched(2, (), 0)]
