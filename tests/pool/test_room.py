"""Memory of one process for several models: who makes room for whom, and who waits."""

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from mlx_troupe.actors.admission_core import AdmissionCore, AdmissionPolicy
from mlx_troupe.actors.memory_ledger import MemoryLedger, planned_lengths
from mlx_troupe.runtime.clock import ManualClock
from mlx_troupe.runtime.errors import NotReady
from mlx_troupe.runtime.peers import Peers
from tests.actors.parts import make_row
from tests.actors.test_memory_plan import LAYOUT
from tests.api.fake_service import FakeService

from .pools import Opened, models, pool_of

LINE = 1000


class Heavy(FakeService):
    """Takes room before it loads, as a runtime does."""

    def __init__(self, peer, size):
        super().__init__(loaded=False)
        self.may_load.set()
        self.peer, self.size = peer, size

    async def __aenter__(self):
        await self.peer.make_room(self.size)
        self.peer.line_bytes = lambda: LINE
        return await super().__aenter__()

    async def __aexit__(self, *error):
        self.peer.rest()
        self.peer.claim_bytes = 0
        await super().__aexit__(*error)


class HeavyOnes(Opened):
    def __init__(self, **sizes):
        super().__init__()
        self.sizes = sizes

    def __call__(self, config, report, peer):
        service = Heavy(peer, self.sizes[config.served_name])
        self.services.setdefault(config.served_name, []).append(service)
        return service


def ready(pool):
    return "".join(entry.name for entry in pool.entries() if entry.state == "ready")


async def use(pool, name, clock):
    clock.advance(1)
    async with pool.lease(name):
        pass


async def test_models_used_longest_ago_go_until_another_fits():
    opened, clock = HeavyOnes(a=300, b=300, c=300, d=500), ManualClock()
    async with pool_of(opened, models("a", "b", "c", "d"), clock) as pool:
        for name in "abca":
            await use(pool, name, clock)
        assert ready(pool) == "abc"
        await use(pool, "d", clock)
        assert ready(pool) == "ad"
        await use(pool, "b", clock)
        assert ready(pool) == "bd"


async def test_a_model_waits_for_those_in_use_and_others_go_on():
    opened, clock = HeavyOnes(a=600, b=600, c=300), ManualClock()
    async with pool_of(opened, models("a", "b", "c"), clock) as pool, anyio.create_task_group() as group:
        async with pool.lease("a"):
            group.start_soon(use, pool, "b", clock)
            await wait_all_tasks_blocked()
            await use(pool, "c", clock)
            assert ready(pool) == "ac"
        await wait_all_tasks_blocked()
        assert "b" in ready(pool)
        assert "a" not in ready(pool)


async def test_what_pinned_models_leave_no_room_for_is_refused_at_once():
    opened, clock = HeavyOnes(a=600, b=600), ManualClock()
    async with pool_of(opened, [*models("a", pin=True), *models("b")], clock) as pool:
        await wait_all_tasks_blocked()
        with pytest.raises(NotReady, match="pinned models leave 0 MiB"):
            await use(pool, "b", clock)
        await use(pool, "a", clock)


async def test_a_model_alone_is_loaded_however_large_it_is():
    opened, clock = HeavyOnes(a=300, b=5000), ManualClock()
    async with pool_of(opened, models("a", "b"), clock) as pool:
        await use(pool, "a", clock)
        await use(pool, "b", clock)
        assert ready(pool) == "b"


async def test_a_request_has_idle_models_unloaded():
    opened, clock = HeavyOnes(a=100, b=100, c=100), ManualClock()
    async with pool_of(opened, models("a", "b", "c"), clock) as pool:
        for name in "abc":
            await use(pool, name, clock)
        async with pool.lease("c"), pool.lease("a"):
            peer = opened["a"].peer
            assert peer.may_get(50), "the only one that nobody uses goes"
            await wait_all_tasks_blocked()
            assert ready(pool) == "ac"
            assert not peer.may_get(50)
            opened["c"].peer.rows = 1
            assert peer.may_get(50), "rows of another engine may end"


def admission(peer, *, line):
    """An engine's admission, and the ledger it plans with."""
    ledger = MemoryLedger(
        LAYOUT, base_bytes=0, pages_bytes=0, line_bytes=line, chunk_tokens=64, others=peer.others_bytes
    )
    core = AdmissionCore(AdmissionPolicy(), clock=ManualClock(), ledger=ledger, peer=peer)
    return core, ledger


async def test_engines_plan_under_one_line():
    """What one has promised its rows the other may not promise; it holds until they end, and alone it never does."""
    board = Peers()
    one, two = board.join("one"), board.join("two")
    mine, other = make_row(range(200)), make_row(range(200))
    needed = admission(one, line=0)[1].need(planned_lengths([mine])).total_bytes
    first, _ = admission(one, line=int(1.5 * needed))
    second, _ = admission(two, line=int(1.5 * needed))
    assert first.submit((mine,)) is None
    first.settle()
    assert first.admitted == 1
    assert second.submit((other,)) is None
    second.settle()
    assert second.admitted == 0
    assert second.holds["memory_others"] > 0
    mine.finish("cancelled", 0.0)
    first.row_done(mine.row)
    first.settle()
    second.settle()
    assert second.admitted == 1
