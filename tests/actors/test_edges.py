"""A fault at every message edge: its receiver raises, or it is lost. Nobody hangs, and nobody hears a wrong token."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, get_args

import pytest

from mlx_troupe.actors.troupe import TICK_S
from mlx_troupe.runtime.errors import NotReady
from mlx_troupe.runtime.messages import admission, cache_store, decode, executor, memory_enforcer, prefill
from mlx_troupe.runtime.messages.cache_disk import DeletePages, FetchPage, TouchPages, WritePage
from tests.actors.parts import endings, expected, make_rows
from tests.actors.troupe import Stage, on_stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mlx_troupe.runtime.actor import Ref
    from mlx_troupe.runtime.messages.cache_disk import CacheDiskMessage
    from mlx_troupe.runtime.messages.cache_store import CacheStoreMessage

UNIONS = {
    "admission": admission.AdmissionMessage,
    "prefill": prefill.PrefillMessage,
    "decode": decode.DecodeMessage,
    "executor": executor.ExecutorMessage,
    "cache_store": cache_store.CacheStoreMessage,
    "memory_enforcer": memory_enforcer.MemoryEnforcerMessage,
}
EDGES = [(name, kind) for name, union in UNIONS.items() for kind in get_args(union)]
ASKS = (admission.Submit, admission.Drain, cache_store.Flush)
"""Their askers wait; the inboxes never lose them, and an actor that dies answers them."""
LAST_WORDS = (decode.ExecutorDied, executor.EngineRaised)
"""Only sent when the engine has failed anyway."""
HANG_S = 2.0


class InstantDisk:
    """A disk in memory, that answers before its asker has done its turn."""

    def __init__(self) -> None:
        self.pages: dict[bytes, Any] = {}
        self._cache_store: Ref[CacheStoreMessage] | None = None

    def start(self, cache_store_ref: Ref[CacheStoreMessage]) -> None:
        """See `CacheDisk.start`."""
        self._cache_store = cache_store_ref
        cache_store_ref.tell(cache_store.DiskOpened((), 1 << 20))

    def tell(self, order: CacheDiskMessage) -> None:
        """See `CacheDisk.tell`."""
        assert self._cache_store is not None
        match order:
            case WritePage():
                self.pages[order.record.chain] = order.blob
                self._cache_store.tell(cache_store.PageWritten(order.page, 16))
            case FetchPage():
                self._cache_store.tell(cache_store.PageFetched(order.page, self.pages.get(order.chain)))
            case DeletePages():
                for chain in order.chains:
                    self.pages.pop(chain, None)
            case TouchPages():
                pass


class Edge:
    """Strikes the first message of one kind that one actor gets, once armed."""

    def __init__(self, stage: Stage, name: str, kind: type, *, raises: bool) -> None:
        actor: Any = getattr(stage.troupe.cast, name)
        handle = actor.handle
        self.struck = 0

        def harmed(message: object) -> None:
            if not isinstance(message, kind) or self.struck:
                handle(message)
                return
            self.struck += 1
            if raises:
                raise RuntimeError(f"injected at {kind.__name__}")

        actor.handle = harmed


@asynccontextmanager
async def harmed_stage(name: str, kind: type, *, raises: bool) -> AsyncIterator[tuple[Stage, Edge]]:
    async with on_stage(
        cache_pages=24, max_rows=3, hang_timeout_s=HANG_S, cache_max_stores=2, disk=InstantDisk()
    ) as stage:
        yield stage, Edge(stage, name, kind, raises=raises)


async def a_day(stage: Stage) -> None:
    """Requests of three families, some cancelled, some put back, some whose state goes bad, and all kinds of news."""
    cast = stage.troupe.cast
    for index in range(9):
        if stage.failures:
            return
        prompt = [(place * (1 + index % 3)) % 64 for place in range(10 + 9 * (index % 4))]
        rows = make_rows(prompt, 12, seed=index, n=1 + (index == 4))
        stage.rows += rows
        if index == 2:
            stage.engine.faults.bad_state[rows[0].row] = 1
        if index == 5:
            stage.engine.faults.bad_chunks[rows[0].row] = 1
        try:
            await stage.troupe.submit(rows)
        except NotReady:
            stage.rows = stage.rows[: -len(rows)]
            return
        await stage.turns(25)
        if stage.failures:
            return
        if index == 3:
            stage.troupe.cancel(rows[0].request_id)
            cast.decode.ref.tell(decode.Preempt("a test"))
        if index == 6:
            cast.admission.ref.tell(admission.PauseAdmission("a test"))
            cast.admission.ref.tell(admission.SetMemoryLine(1 << 40))
            cast.prefill.ref.tell(prefill.SetChunkLine(1 << 40))
            cast.admission.ref.tell(admission.PauseAdmission(None))
            cast.cache_store.ref.tell(cache_store.Reclaim(200))
            cast.cache_store.ref.tell(cache_store.SetBudget(384))
        stage.clock.advance(TICK_S)  # type: ignore[attr-defined]
        stage.troupe.tick()


async def wait_for_the_end(stage: Stage) -> None:
    """Virtual time goes on, well beyond the hang timeout, until every row has ended or the troupe has."""
    for _ in range(int(30 / TICK_S)):
        await stage.turns(60)
        if stage.failures or all(row.finished for row in stage.rows):
            return
        stage.clock.advance(TICK_S)  # type: ignore[attr-defined]
        stage.troupe.tick()


def assert_answered(stage: Stage) -> Counter[str]:
    """Everybody heard one end, and nothing wrong before it."""
    for row in stage.rows:
        assert len(endings(row)) == 1, row
        assert row.output == expected(row)[: len(row.output)]
        if row.finish_reason == "length":
            assert len(row.output) == row.max_tokens
    ends = Counter(str(row.finish_reason) for row in stage.rows)
    assert all(reason in {"length", "cancelled"} or reason.startswith("error:") for reason in ends), ends
    return ends


@pytest.mark.parametrize(("name", "kind"), [edge for edge in EDGES if edge[1] not in LAST_WORDS])
async def test_a_receiver_that_raises(name: str, kind: type) -> None:
    async with harmed_stage(name, kind, raises=True) as (stage, edge):
        await a_day(stage)
        if kind in {admission.Drain, cache_store.Flush}:
            await stage.turns(2000)
            await (stage.troupe.flush_cache() if kind is cache_store.Flush else _refused_drain(stage))
        await wait_for_the_end(stage)
        assert edge.struck == 1, "the day has no such message"
        assert_answered(stage)
        (failure,) = stage.failures
        assert "injected at" in str(failure)
        with pytest.raises(NotReady):
            await stage.troupe.submit(make_rows(range(5)))


async def _refused_drain(stage: Stage) -> None:
    with pytest.raises(NotReady):
        await stage.troupe.drain()


@pytest.mark.parametrize(("name", "kind"), [edge for edge in EDGES if edge[1] not in (*ASKS, *LAST_WORDS)])
async def test_a_message_that_is_lost(name: str, kind: type) -> None:
    async with harmed_stage(name, kind, raises=False) as (stage, edge):
        await a_day(stage)
        await wait_for_the_end(stage)
        assert edge.struck == 1, "the day has no such message"
        assert_answered(stage)
        if stage.failures:
            return  # the supervisor starts a new troupe
        await stage.submit(range(7), 5)
        await wait_for_the_end(stage)
        assert_answered(stage)


async def test_an_unharmed_day_has_no_failure() -> None:
    async with harmed_stage("admission", int, raises=True) as (stage, _):
        await a_day(stage)
        await wait_for_the_end(stage)
        ends = assert_answered(stage)
        assert not stage.failures
        assert set(ends) == {"length", "cancelled"}
        assert stage.troupe.statistics().cache.restored_pages > 0
