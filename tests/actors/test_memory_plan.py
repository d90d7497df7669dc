"""Memory as a plan: what admission lets in, how large chunks are, and when decode puts rows back."""

from __future__ import annotations

import pytest

from mlx_troupe.actors.decode_rows import RunningRow
from mlx_troupe.actors.memory_guard import RECLAIM_STEPS, MemoryGuard
from mlx_troupe.actors.memory_ledger import GUARD_STEPS, MemoryLedger, pages_budget_bytes, planned_length
from mlx_troupe.actors.prefill_cost import ChunkCost
from mlx_troupe.actors.prefill_policy import PrefillPolicy, Prompt, chunk_tokens
from mlx_troupe.actors.transients import FIRST_RATIO, TRUSTED_AFTER, ChunkMemory
from mlx_troupe.runtime.kv_estimate import KVKind, KVLayout, batch_bytes, transient_bytes
from tests.actors.parts import make_row

LAYOUT = KVLayout(kinds=(KVKind(None, 100),), activation_bytes=1000.0, score_bytes=1.0)
ROW = 256 * 100
"""Bytes of a short row."""


def ledger(line: int, *, base: int = 0, pages: int = 0) -> MemoryLedger:
    return MemoryLedger(LAYOUT, base_bytes=base, pages_bytes=pages, line_bytes=line, chunk_tokens=64)


def test_the_need_is_rows_and_the_dearest_moment() -> None:
    need = ledger(0, base=1000, pages=500).need([50, 60])
    assert need.rows_bytes == 1500 + 2 * ROW
    assert need.moment_bytes == 2 * ROW + (60 + 255) * 100, "a join: the old buffers, and the row's own KV"
    deep = KVLayout(kinds=LAYOUT.kinds, activation_bytes=1000.0, score_bytes=1000.0)
    costly = MemoryLedger(deep, base_bytes=0, pages_bytes=0, line_bytes=0, chunk_tokens=64).need([50])
    assert costly.moment_bytes == int(2.0 * transient_bytes(deep, 32, 50)), "a smallest chunk, twice as dear"


def test_what_fits_does_so_exactly() -> None:
    need = ledger(0).need([50, 60]).total_bytes
    assert ledger(need).shortage_bytes([50, 60]) == 0
    assert ledger(need - 1).shortage_bytes([50, 60]) == 1
    assert ledger(need).chunk_room_bytes([50, 60]) == need - 2 * ROW


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "returns", "planned"),
    [(10, 20, 0, 30), (10, 5000, 0, 266), (10, 5000, 1, 5010)],
)
def test_planned_lengths(prompt: int, max_tokens: int, returns: int, planned: int) -> None:
    row = make_row(range(prompt), max_tokens)
    row.returns = returns
    assert planned_length(row) == planned


def test_the_cache_gets_a_share_of_what_the_model_leaves() -> None:
    assert pages_budget_bytes(1000, 10_000, 2_000) == 1000
    assert pages_budget_bytes(5000, 10_000, 2_000) == 2000
    assert pages_budget_bytes(5000, 10_000, 20_000) == 0


def test_the_row_limit_says_what_can_ever_run() -> None:
    book = ledger(1_000_000)
    longest = book.row_limit(1 << 20, 1_000_000)
    assert book.alone_bytes(longest) <= 1_000_000 < book.alone_bytes(longest + 1)
    assert book.row_limit(100, 1_000_000) == 100


# --- chunks -----------------------------------------------------------------------------------------------------------


def test_chunks_shrink_with_room_and_depth_but_not_below_the_floor() -> None:
    memory = ChunkMemory(LAYOUT)
    prompt = Prompt((make_row(range(20_000)),), 0.0, 0)
    policy, cost = PrefillPolicy(), ChunkCost(1e-6)
    sizes = []
    for room in (10_000_000, 1_000_000, 100_000, 0):
        memory.room_bytes = room
        sizes.append(chunk_tokens(prompt, cost, policy, contended=False, memory=memory))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 32
    assert FIRST_RATIO * transient_bytes(LAYOUT, sizes[1], 0) <= 1_000_000
    memory.room_bytes = 1_000_000
    prompt.computed = 10_000
    assert chunk_tokens(prompt, cost, policy, contended=False, memory=memory) < sizes[1]


def test_what_chunks_cost_is_learnt_and_the_dearest_is_remembered() -> None:
    memory = ChunkMemory(LAYOUT)
    predicted = transient_bytes(LAYOUT, 100, 0)
    assert memory.ratio == FIRST_RATIO
    for _ in range(TRUSTED_AFTER):
        memory.observe(100, 0, int(predicted / 10))
    assert memory.ratio == pytest.approx(0.13, rel=0.01)
    memory.observe(100, 0, int(3 * predicted))
    for _ in range(50):
        memory.observe(100, 0, int(predicted / 10))
    assert memory.ratio == pytest.approx(3.0, rel=0.06)
    before = memory.ratio
    memory.observe(100, 0, 0)
    assert memory.ratio == before, "nothing was measured"


# --- the guard --------------------------------------------------------------------------------------------------------


def rows(*lengths: int) -> list[RunningRow]:
    """Running rows, the oldest first."""
    found = []
    for place, length in enumerate(lengths):
        request = make_row(range(4), 5000, arrived_s=float(place))
        request.computed = length
        found.append(RunningRow(request))
    return found


def test_the_guard_puts_back_as_few_as_it_takes() -> None:
    running = rows(100, 100, 100, 100)
    used = batch_bytes(LAYOUT, [100] * 4)
    grown = 4 * 512 * 100
    assert MemoryGuard(ledger(0), used + grown).surplus_rows(used, running) == 0
    assert MemoryGuard(ledger(0), used + grown - 1).surplus_rows(used, running) == 1
    assert MemoryGuard(ledger(0), 0).surplus_rows(used, running) == 3, "never the last one"
    assert MemoryGuard(ledger(0), 0).surplus_rows(0, running) == 0, "nothing is known"
    assert MemoryGuard(ledger(0), used).surplus_rows(used, rows(10, 10)) == 0, "buffers do not grow soon"


def test_the_guard_looks_now_and_then_and_when_rows_joined() -> None:
    guard = MemoryGuard(ledger(0), 1 << 40)
    running = rows(100, 100)
    assert guard.surplus_rows(1, running) == 0
    guard.line_bytes = 0
    looks = [guard.surplus_rows(1, running) for _ in range(GUARD_STEPS)]
    assert looks == [0] * (GUARD_STEPS - 1) + [1]
    assert [guard.surplus_rows(1, running) for _ in range(GUARD_STEPS)] == [0] * GUARD_STEPS, "buffers shrink first"
    assert guard.surplus_rows(1, rows(100, 100, 100)) == 2, "one more joined"


def test_the_guard_asks_the_cache_before_it_puts_anybody_back() -> None:
    guard = MemoryGuard(ledger(0, pages=1000), 0)
    running = rows(100, 100)
    assert guard.surplus_rows(5000, running) == 0
    assert guard.reclaim_bytes == ledger(0).excess_bytes(5000, [100, 100], 0) > 5000
    looks = [guard.surplus_rows(5000, running) for _ in range(RECLAIM_STEPS)]
    assert looks == [0] * (RECLAIM_STEPS - 1) + [1], "it did not help"
    alone = MemoryGuard(ledger(0, pages=1000), 0)
    assert alone.surplus_rows(5000, rows(100)) == 0
    assert alone.reclaim_bytes > 0, "the last row is never put back, but it needs the room"


def test_luck_is_not_trusted_beyond_the_slack() -> None:
    memory = ChunkMemory(LAYOUT, slack_bytes=100_000)
    memory.room_bytes = 400_000
    for _ in range(TRUSTED_AFTER):
        memory.observe(100, 0, int(transient_bytes(LAYOUT, 100, 0) / 10))
    tokens = memory.tokens_within(0)
    assert tokens > first_chunk(400_000).tokens_within(0), "some of it is"
    assert FIRST_RATIO * transient_bytes(LAYOUT, tokens, 0) <= 500_000


def first_chunk(room_bytes: int) -> ChunkMemory:
    memory = ChunkMemory(LAYOUT)
    memory.room_bytes = room_bytes
    return memory


def test_a_join_needs_the_larger_buffers_and_room_to_copy_them_once() -> None:
    running, joining = rows(100, 100), rows(40)
    larger = 3 * 256 * 100
    used = 2 * 256 * 100
    needed = used + 2 * larger - used
    assert not MemoryGuard(ledger(0), needed).turns_away(used, running, joining)
    assert MemoryGuard(ledger(0), needed - 1).turns_away(used, running, joining)
    assert not MemoryGuard(ledger(0), 0).turns_away(used, [], joining), "nobody decodes: what is there was planned"
    assert not MemoryGuard(ledger(0), 0).turns_away(0, running, joining), "nothing is known"


def test_a_buffer_may_grow_later_than_one_made_anew_would_be_larger() -> None:
    """At 130 tokens new buffers have 512 places; those made at 100 have 256, and grow when they are full."""
    used = batch_bytes(LAYOUT, [130, 130])
    assert MemoryGuard(ledger(0), used).surplus_rows(used, rows(130, 130)) == 1
    assert MemoryGuard(ledger(0), used).surplus_rows(used, rows(260, 260)) == 0
