"""Cached prefixes make room before anybody is refused, held or put back; and get it back when nobody needs it."""

from __future__ import annotations

import random

import pytest

from mlx_troupe.runtime.errors import InvalidRequest
from tests.actors.device import Device
from tests.actors.parts import expected
from tests.actors.troupe import Stage, on_stage

LINE = 1_000_000
CACHE_PAGES = 100_000
"""More than there is room for: the cache gets its share of what the model leaves."""


def a_stage():
    return on_stage(
        device=Device(LINE, random.Random(1)), memory_limit_bytes=LINE, cache_pages=CACHE_PAGES, prefill_chunk_tokens=64
    )


async def filled(stage: Stage) -> int:
    """Fill the prefix cache to its budget; how many bytes it has."""
    tree = stage.troupe.cast.cache_store.core.tree
    for family in range(12):
        await stage.submit([(family * 31 + place) % 64 for place in range(400)], 2)
        await stage.finish()
    assert tree.ram_bytes > 0.9 * tree.budget_bytes
    return tree.ram_bytes


async def test_a_long_row_has_the_cache_shrink_and_grow_again() -> None:
    async with a_stage() as stage:
        troupe = stage.troupe
        cached = await filled(stage)
        tree, admission = troupe.cast.cache_store.core.tree, troupe.cast.admission.core
        whole = tree.budget_bytes
        most = troupe.row_limit_tokens
        assert most is not None
        assert admission.ledger is not None
        assert admission.ledger.shortage_bytes([most]) > 0, "it does not fit beside the cache"
        troupe.check_memory(most)
        (row,) = await stage.submit(range(most - 4), 4)
        await stage.until(lambda: bool(row.output))
        assert admission.holds["reclaim"] > 0
        assert tree.ram_bytes <= tree.budget_bytes < cached
        await stage.finish()
        assert row.output == expected(row)
        assert tree.budget_bytes == whole, "nobody needs it any more"
        assert stage.engine.device is not None
        assert stage.engine.device.peak_bytes <= LINE
        with pytest.raises(InvalidRequest):
            troupe.check_memory(most + 1)


async def test_leased_pages_are_waited_for() -> None:
    """The head is let in when the leases have ended, not before."""
    async with a_stage() as stage:
        troupe = stage.troupe
        await filled(stage)
        tree = troupe.cast.cache_store.core.tree
        prefix = [(11 * 31 + place) % 64 for place in range(400)]
        assert tree.match(10**9, tuple(prefix), 399).tokens > 300  # a stranger's lease
        most = troupe.row_limit_tokens
        assert most is not None
        (row,) = await stage.submit(range(most - 4), 4)
        await stage.turns(300)
        assert not row.output
        assert tree.ram_bytes > tree.budget_bytes
        tree.unlease(10**9)
        troupe.tick()
        await stage.finish()
        assert row.output == expected(row)
