"""A whole troupe around the fake engine, in virtual time, on one loop, without sleeping."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from mlx_troupe.actors.troupe import Troupe
from mlx_troupe.runtime.clock import Clock, ManualClock
from mlx_troupe.runtime.config import RuntimeConfig
from mlx_troupe.runtime.engine_protocol import EngineFacts
from tests.actors.parts import InlineThread, make_rows
from tests.fake_engine import Costs, FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from mlx_troupe.actors.cache_disk import CacheDisk
    from mlx_troupe.runtime.errors import TroupeError
    from mlx_troupe.runtime.peers import Peer
    from mlx_troupe.runtime.request import Request
    from tests.actors.device import Device

PAGE = 4
MANY_TURNS = 200_000


class Stage:
    """The troupe under test, its engine, and the hands on its clock."""

    def __init__(
        self,
        *,
        overlap: bool = True,
        costs: Costs | None = None,
        cache_pages: int = 64,
        prefill_token_s: float = 0.0,
        clock: Clock | None = None,
        thread: Any = None,
        footprint: int = 0,
        device: Device | None = None,
        disk: CacheDisk | None = None,
        peer: Peer | None = None,
        **config: Any,
    ) -> None:
        self.clock: Clock = clock or ManualClock()
        settings: dict[str, Any] = {
            "page_tokens": PAGE,
            "prefix_cache_bytes": cache_pages * 16,
            "prefill_chunk_tokens": 16,
            "memory_limit_bytes": 1 << 40,
            "fair_share": 0.3,
        }
        self.config = RuntimeConfig(**(settings | config))
        memory = {} if device is None else {"kv": device.layout, "base_bytes": device.base_bytes}
        facts = EngineFacts(
            vocab_size=64,
            context_length=1 << 20,
            page_bytes=16 if device is None else PAGE * device.layout.token_bytes,
            overlap="launch" if overlap else "off",
            prefill_token_s=prefill_token_s,
            **memory,
        )
        self.engine = FakeEngine(facts, page_tokens=PAGE, clock=self.clock, costs=costs)
        self.engine.device = device
        self.thread = thread or InlineThread()
        self.failures: list[TroupeError] = []
        self.troupe = Troupe(
            self.config,
            facts,
            self.engine,
            self.thread,
            clock=self.clock,
            on_failure=self.failures.append,
            tick_s=None,
            footprint=lambda: footprint,
            disk=disk,
            peer=peer,
        )
        self.rows: list[Request] = []

    async def submit(self, prompt: Sequence[int], max_tokens: int = 4, **more: Any) -> tuple[Request, ...]:
        """Make the rows of a request and queue them."""
        rows = make_rows(prompt, max_tokens, arrived_s=self.clock.now(), **more)
        await self.troupe.submit(rows)
        self.rows += rows
        return rows

    async def until(self, done: Callable[[], bool]) -> None:
        """Let the loop turn until something holds."""
        for _ in range(MANY_TURNS):
            if done():
                return
            await anyio.lowlevel.checkpoint()
        raise AssertionError("it never came")

    async def turns(self, count: int) -> None:
        """Let the loop turn a few times."""
        for _ in range(count):
            await anyio.lowlevel.checkpoint()

    @property
    def quiet(self) -> bool:
        """True when no request is alive and no message or job is on its way."""
        cast = self.troupe.cast
        cores = cast.admission.core, cast.prefill.core, cast.decode.core, cast.cache_store.core
        return all(core.idle for core in cores) and not any(actor.depth for actor in cast) and not self.thread.jobs

    async def finish(self) -> None:
        """Wait until all is quiet, then check that nothing was lost or left."""
        await self.until(lambda: bool(self.failures) or self.quiet)
        await self.turns(20)
        assert not self.failures, self.failures
        assert self.quiet
        self.engine.check_empty()
        core = self.troupe.cast.cache_store.core
        core.check_integrity(self.engine.pages)
        assert core.tree.leased == 0
        assert all(row.finished for row in self.rows)


@asynccontextmanager
async def on_stage(**settings: Any) -> AsyncIterator[Stage]:
    """Open a troupe; it is stopped at the end of the block."""
    stage = Stage(**settings)
    async with anyio.create_task_group() as group:
        await group.start(stage.troupe.run)
        yield stage
        group.cancel_scope.cancel()
