"""The cache-store's core: what it tells the engine, prefill and the disk."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from mlx_troupe.actors.cache_core import CachePolicy, CacheStoreCore
from mlx_troupe.actors.cache_misses import MissLog
from mlx_troupe.actors.cache_spill import PAUSE_S
from mlx_troupe.runtime.clock import ManualClock
from mlx_troupe.runtime.messages.cache_disk import DeletePages, FetchPage, WritePage
from mlx_troupe.runtime.messages.cache_store import (
    DiskOpened,
    Match,
    PageFetched,
    PageLoaded,
    PageRead,
    PageWritten,
    Store,
)
from mlx_troupe.runtime.messages.executor import AdoptPages, DropPages, LoadPage, ReadPage
from mlx_troupe.runtime.messages.prefill import Matched, Restoring, StorePressure
from mlx_troupe.runtime.page_blob import ArraySpec, PageBlob, PageLayout

if TYPE_CHECKING:
    import pytest

TOKENS = tuple(range(100, 112))
ENDS = (4, 8, 12)
BLOB = PageBlob(PageLayout(0, 4, ((ArraySpec("uint8", (100,)),),)), (bytes(100),))


def make_core(budget_pages: int = 10, *, disk: bool = False, clock: ManualClock | None = None, **more: Any) -> Any:
    policy = CachePolicy(page_tokens=4, page_bytes=100, budget_bytes=100 * budget_pages + 99, **more)
    core = CacheStoreCore(policy, clock=clock or ManualClock())
    if disk:
        core.disk_opened(DiskOpened((), 1 << 20))
    return core


def taken(outbox: list[Any], kind: type) -> list[Any]:
    found = [message for message in outbox if isinstance(message, kind)]
    outbox[:] = [message for message in outbox if not isinstance(message, kind)]
    return found


def spill_all(core: Any) -> list[WritePage]:
    """Let engine and disk do what the core asks, until it asks no more."""
    written = []
    while True:
        core.settle()
        reads = taken(core.to_executor, ReadPage)
        for read in reads:
            core.page_read(PageRead(read.page, BLOB))
        writes = taken(core.to_disk, WritePage)
        for order in writes:
            written.append(order)
            core.page_written(PageWritten(order.page, 100))
        if not reads and not writes:
            return written


def test_a_match_leaves_the_last_token_to_decode() -> None:
    core = make_core()
    core.store(Store(1, TOKENS, ENDS))
    core.match(Match(2, TOKENS))
    assert core.to_prefill == [Matched(2, (1, 2, 3), 11)]
    counted = core.statistics()
    assert (counted.queries, counted.queried_tokens, counted.hit_tokens) == (1, 11, 11)
    assert (counted.hits_ram, counted.hits_disk, counted.hits_partial) == (1, 0, 1)
    assert (counted.stored_pages, counted.ram_bytes) == (3, 300)


def test_asking_again_counts_only_what_is_new() -> None:
    core = make_core()
    core.store(Store(1, TOKENS[:4], (4,)))
    core.match(Match(2, TOKENS))
    core.store(Store(1, TOKENS[:8], (8,)))
    core.match(Match(2, TOKENS, "", 4))
    counted = core.statistics()
    assert (counted.queries, counted.hits_ram, counted.hit_tokens) == (1, 1, 8)


def test_every_store_is_followed_by_an_adoption_that_frees_the_rest() -> None:
    core = make_core()
    core.store(Store(1, TOKENS[:8], (4, 8)))
    core.store(Store(2, TOKENS, ENDS))
    core.store(Store(3, TOKENS, ENDS))
    assert core.to_executor == [
        AdoptPages(1, ((4, 1), (8, 2)), 1),
        AdoptPages(2, ((4, 0), (8, 0), (12, 3)), 2),
        AdoptPages(3, ((4, 0), (8, 0), (12, 0)), 3),
    ]


def test_evicted_pages_are_dropped_before_new_ones_are_named() -> None:
    core = make_core(budget_pages=2)
    core.store(Store(1, TOKENS[:8], (4, 8)))
    core.to_executor.clear()
    core.store(Store(2, tuple(range(8)), (4, 8)))
    drop, adopt = core.to_executor
    assert isinstance(drop, DropPages)
    assert set(drop.pages) == {1, 2}
    assert adopt == AdoptPages(2, ((4, 3), (8, 4)), 2)
    assert core.statistics().evicted_pages == 2


def test_lost_pages_go_with_all_behind_them() -> None:
    core = make_core()
    core.store(Store(1, TOKENS, ENDS))
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
    core.store(Store(1, TOKENS, ENDS))
    core.match(Match(2, TOKENS[:5]))
    core.reclaim(101)
    assert core.tree.ram_bytes == 100
    core.reclaim(10_000)
    assert core.tree.ram_bytes == 100
    core.unlease(2)
    core.reclaim(1)
    assert core.tree.ram_bytes == 0


def test_without_a_budget_nothing_is_kept() -> None:
    core = CacheStoreCore(CachePolicy(page_tokens=4, page_bytes=100, budget_bytes=0), clock=ManualClock())
    core.store(Store(1, TOKENS, ENDS))
    core.match(Match(2, TOKENS))
    core.reclaim(5)
    assert core.to_executor == [AdoptPages(1, ((4, 0), (8, 0), (12, 0)), 1)]
    assert core.to_prefill == [Matched(2, (), 0)]


def test_salts_never_share() -> None:
    core = make_core()
    core.store(Store(1, TOKENS, ENDS, (), "a"))
    for namespace, expected in (("b", 0), ("", 0), ("a", 11)):
        core.match(Match(2, TOKENS, namespace))
        assert core.to_prefill.pop().tokens == expected


def test_stores_under_way_are_capped() -> None:
    core = make_core(max_stores=2)
    core.store(Store(1, TOKENS[:4], (4,)))
    core.settle()
    assert core.to_prefill == []
    core.store(Store(1, TOKENS[:8], (8,)))
    core.settle()
    assert core.to_prefill == [StorePressure(True)]
    core.adopted(1)
    core.settle()
    assert core.to_prefill == [StorePressure(True), StorePressure(False)]


def test_pages_are_written_one_at_a_time_parents_first() -> None:
    core = make_core(disk=True)
    core.store(Store(1, TOKENS, ENDS))
    core.settle()
    assert taken(core.to_executor, ReadPage) == [ReadPage(1)]
    core.settle()
    assert taken(core.to_executor, ReadPage) == [], "one at a time"
    core.page_read(PageRead(1, BLOB))
    (order,) = taken(core.to_disk, WritePage)
    core.page_written(PageWritten(order.page, 100))
    assert [order.page for order in spill_all(core)] == [2, 3]
    assert (core.statistics().spilled_pages, core.tree.disk_bytes) == (3, 300)
    assert core.tree.leased == 0


def test_the_spill_queue_drops_and_counts_and_mends_later() -> None:
    core = make_core(disk=True, spill_queue=1)
    core.store(Store(1, TOKENS[:8], (4, 8)))
    assert core.statistics().dropped_spills == 1
    assert [order.page for order in spill_all(core)] == [1]
    core.store(Store(1, TOKENS, (12,)))
    assert [order.page for order in spill_all(core)] == [2, 3], "the page that was dropped goes before the next"


def test_a_fault_pauses_the_disk_and_loses_nothing_else() -> None:
    clock = ManualClock()
    core = make_core(disk=True, clock=clock)
    core.store(Store(1, TOKENS, ENDS))
    core.settle()
    core.page_read(PageRead(1, BLOB))
    core.page_written(PageWritten(1, 0, "no space left"))
    core.to_executor.clear()
    core.to_disk.clear()
    core.settle()
    assert core.to_executor == []
    assert core.statistics().disk_faults == 1
    clock.advance(PAUSE_S)
    assert [order.page for order in spill_all(core)] == [1, 2, 3]


def test_the_disk_budget_is_kept_by_deleting_the_oldest() -> None:
    core = make_core()
    core.disk_opened(DiskOpened((), 17_000))
    core.store(Store(1, TOKENS[:8], (4, 8)))
    spill_all(core)
    core.store(Store(2, tuple(range(500)), tuple(range(4, 501, 4))))
    spill_all(core)
    assert core.tree.disk_bytes <= 17_000
    assert core.statistics().disk_evicted_pages == sum(len(m.chains) for m in taken(core.to_disk, DeletePages))


def test_write_back_writes_when_ram_is_nearly_full() -> None:
    core = make_core(4, disk=True, spill="write-back")
    core.store(Store(1, TOKENS, ENDS))
    assert spill_all(core) == []
    core.store(Store(2, (1, 2, 3, 4), (4,)))
    assert [order.page for order in spill_all(core)][:1] == [1]


def test_a_flush_writes_all_that_is_in_ram_only() -> None:
    core = make_core(disk=True, spill="write-back")
    core.store(Store(1, TOKENS, ENDS))
    core.spill.flush()
    assert [order.page for order in spill_all(core)] == [1, 2, 3]
    assert core.spill.idle


def cold_core(clock: ManualClock, **more: Any) -> Any:
    """Three pages on disk only."""
    core = make_core(disk=True, clock=clock, **more)
    core.store(Store(1, TOKENS, ENDS))
    spill_all(core)
    core.adopted(1)
    core.reclaim(10_000)
    core.to_executor.clear()
    core.to_disk.clear()
    return core


def test_pages_on_disk_are_restored_before_the_answer() -> None:
    clock = ManualClock()
    core = cold_core(clock)
    core.match(Match(2, TOKENS))
    core.settle()
    assert core.to_prefill == [Restoring(2)]
    fetches = taken(core.to_disk, FetchPage)
    assert [order.page for order in fetches] == [1, 2, 3]
    clock.advance(0.5)
    for order in fetches:
        core.page_fetched(PageFetched(order.page, BLOB))
        assert taken(core.to_executor, LoadPage) == [LoadPage(order.page, BLOB)]
        core.settle()
        core.page_loaded(PageLoaded(order.page))
        core.settle()
    assert core.to_prefill == [Restoring(2), Matched(2, (1, 2, 3), 11)]
    counted = core.statistics()
    assert (counted.restored_pages, counted.restore_s, counted.hits_disk, counted.hits_ram) == (3, 0.5, 1, 0)
    core.unlease(2)
    core.tree.check_integrity()


def test_at_the_deadline_a_row_gets_what_is_there() -> None:
    clock = ManualClock()
    core = cold_core(clock, restore_timeout_s=2.0)
    core.match(Match(2, TOKENS))
    core.page_fetched(PageFetched(1, BLOB))
    core.page_loaded(PageLoaded(1))
    clock.advance(1.9)
    core.settle()
    assert core.to_prefill == [Restoring(2)]
    clock.advance(0.1)
    core.settle()
    assert core.to_prefill == [Restoring(2), Matched(2, (1,), 4)]
    assert core.statistics().restore_timeouts == 1
    core.page_fetched(PageFetched(2, BLOB))
    core.page_loaded(PageLoaded(2))
    assert core.tree.ram_ids() == {1, 2}, "what comes late is still of use"


def test_a_page_that_cannot_be_read_is_a_miss() -> None:
    clock = ManualClock()
    core = cold_core(clock)
    core.match(Match(2, TOKENS))
    core.page_fetched(PageFetched(1, BLOB))
    core.page_loaded(PageLoaded(1))
    core.page_fetched(PageFetched(2, None))
    core.settle()
    assert core.to_prefill == [Restoring(2), Matched(2, (1,), 4)]
    core.page_fetched(PageFetched(3, BLOB))
    core.settle()
    assert core.restore.idle
    assert core.statistics().lost_pages == 2
    core.unlease(2)
    core.tree.check_integrity()


def test_two_rows_wait_for_one_reading() -> None:
    clock = ManualClock()
    core = cold_core(clock)
    core.match(Match(2, TOKENS))
    core.match(Match(3, TOKENS))
    fetches = taken(core.to_disk, FetchPage)
    assert [order.page for order in fetches] == [1, 2, 3]
    for order in fetches:
        core.page_fetched(PageFetched(order.page, BLOB))
        core.page_loaded(PageLoaded(order.page))
    core.settle()
    assert {message.row for message in taken(core.to_prefill, Matched)} == {2, 3}


def test_a_surprising_miss_is_explained_in_numbers(caplog: pytest.LogCaptureFixture) -> None:
    misses = MissLog(page_tokens=4, missed_tokens=10)
    misses.stored(tuple(range(40)), "")
    with caplog.at_level(logging.INFO):
        misses.look((*range(20), *range(500, 540)), "", 20)
    assert "40 of 60 prompt tokens" not in caplog.text
    assert "39 of 60 prompt tokens are computed again; they part" in caplog.text
    assert "after 20 tokens, 20 of which were found" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        misses.look(tuple(range(60)), "", 0)
        misses.look(tuple(range(500, 560)), "", 0)
        misses.look(tuple(range(60)), "another salt", 0)
    assert caplog.text.count("\n") == 1
    assert "although 40 were stored lately (0 found)" in caplog.text
