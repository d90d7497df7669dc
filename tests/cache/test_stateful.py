"""Tree, pages and tiers against a plain dictionary: random stores, matches, spills, faults, evictions and restarts.

The engine is a dictionary of page id to prefix, the disk one of chain to prefix; both do what the core orders, when the
machine lets them. After each step the core's own integrity must hold, and each match must be exactly the best that the
two dictionaries can give.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_troupe.actors.cache_core import CachePolicy, CacheStoreCore
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
from mlx_troupe.runtime.messages.executor import NO_PAGE, AdoptPages, DropPages, LoadPage, ReadPage
from mlx_troupe.runtime.messages.prefill import Matched
from mlx_troupe.runtime.page_blob import ArraySpec, PageBlob, PageLayout, StateSpec
from mlx_troupe.runtime.prefix_page import token_key

PAGE = 3
PAGE_BYTES = 30_000
FILE_BYTES = PAGE_BYTES
Piece = tuple[str, tuple[int, ...], bool]
"""Namespace, prefix, and whether it carries a checkpoint."""

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)
namespaces = st.sampled_from(["", "salt"])


class CacheMachine(RuleBasedStateMachine):
    """See the module."""

    checkpoints = False

    @initialize(
        pages=st.integers(1, 9),
        disk_pages=st.integers(0, 12),
        spill=st.sampled_from(["write-through", "write-back"]),
        queue=st.integers(1, 6),
    )
    def begin(self, pages: int, disk_pages: int, spill: Any, queue: int) -> None:
        self.clock = ManualClock()
        self.policy = CachePolicy(
            page_tokens=PAGE,
            page_bytes=PAGE_BYTES,
            budget_bytes=pages * PAGE_BYTES,
            checkpoints=self.checkpoints,
            checkpoint_bytes=PAGE_BYTES // 2 if self.checkpoints else 0,
            spill=spill,
            spill_queue=queue,
        )
        self.disk_budget = disk_pages * (PAGE_BYTES + 20_000)
        self.disk: dict[bytes, tuple[Piece, Any]] = {}
        self.asked: dict[int, Match] = {}
        self.row = 0
        self.start()

    def start(self) -> None:
        self.core = CacheStoreCore(self.policy, clock=self.clock)
        self.engine: dict[int, Piece] = {}
        self.orders: list[Any] = []
        self.aside: dict[int, tuple[str, tuple[int, ...], set[int]]] = {}
        self.asked.clear()
        records = sorted((record for _, record in self.disk.values()), key=lambda record: len(self.prefix(record)))
        self.core.disk_opened(DiskOpened(tuple(records), self.disk_budget))
        self.turn()

    def prefix(self, record: Any) -> tuple[int, ...]:
        return self.disk[record.chain][0][1]

    def turn(self) -> None:
        """Let the core settle; the engine does its orders at once, the disk waits for its rules."""
        while True:
            self.core.settle()
            orders, self.core.to_executor = list(self.core.to_executor), []
            self.orders += self.core.to_disk
            self.core.to_disk.clear()
            answers = [message for message in self.core.to_prefill if isinstance(message, Matched)]
            self.core.to_prefill.clear()
            for order in orders:  # the engine has them before any chunk of the answers
                self.engine_does(order)
            for answer in answers:
                self.judge(answer)
            if not orders:
                return

    def engine_does(self, order: Any) -> None:
        match order:
            case AdoptPages():
                namespace, tokens, states = self.aside.pop(order.row)
                for end, page in order.pages:
                    if page != NO_PAGE:
                        self.engine[page] = (namespace, tokens[:end], end in states)
                self.core.adopted(order.store)
            case DropPages():
                for page in order.pages:
                    assert self.engine.pop(page, None) is not None
            case ReadPage():
                self.core.page_read(PageRead(order.page, blob_of(self.engine[order.page])))
            case LoadPage():
                assert order.page not in self.engine
                self.engine[order.page] = piece_of(order.blob)
                self.core.page_loaded(PageLoaded(order.page))

    def judge(self, answer: Matched) -> None:
        """What a row gets is of its own tokens, and no page in RAM would have given more."""
        asked = self.asked.pop(answer.row)
        limit = asked.tokens[:-1]
        pages = [self.engine[page] for page in answer.pages]
        assert all(piece[0] == asked.namespace for piece in pages)
        assert [len(piece[1]) for piece in pages[:-1]] == [PAGE * (n + 1) for n in range(len(pages) - 1)]
        if pages:
            assert pages[-1][1][: answer.tokens] == limit[: answer.tokens]
            assert len(pages[-2][1]) if len(pages) > 1 else 0 < answer.tokens <= len(pages[-1][1])
        assert answer.tokens == self.best(asked.namespace, limit, self.engine.values())
        if self.checkpoints and pages:
            assert pages[-1][2]
            assert len(pages[-1][1]) == answer.tokens

    def best(self, namespace: str, limit: tuple[int, ...], pieces: Any) -> int:
        """Most tokens that some piece gives."""
        gains = [0]
        for piece_namespace, prefix, state in pieces:
            if piece_namespace != namespace:
                continue
            if not self.checkpoints:
                gains.append(common(prefix, limit))
            elif state and limit[: len(prefix)] == prefix:
                gains.append(len(prefix))
        return max(gains)

    # --- what may happen --------------------------------------------------------------------------------------------

    @rule(tokens=prompts, namespace=namespaces, data=st.data())
    def store(self, tokens: tuple[int, ...], namespace: str, data: Any) -> None:
        self.row += 1
        ends = sorted({*range(PAGE, len(tokens) + 1, PAGE), len(tokens)})
        low = data.draw(st.integers(0, len(ends) - 1))
        ends = ends[low:]
        states = set(data.draw(st.lists(st.sampled_from(ends), unique=True))) if self.checkpoints else set()
        self.aside[self.row] = (namespace, tokens, states)
        self.core.store(Store(self.row, tokens, tuple(ends), tuple(sorted(states)), namespace))
        self.turn()

    @rule(tokens=prompts, namespace=namespaces)
    def match(self, tokens: tuple[int, ...], namespace: str) -> None:
        self.row += 1
        self.asked[self.row] = Match(self.row, tokens, namespace)
        held = [*self.engine.values(), *(piece for piece, _ in self.disk.values())]
        self.core.match(self.asked[self.row])
        found = self.core.tree._leases.get(self.row, [])
        best = self.best(namespace, tokens[:-1], held)
        if self.row in self.asked and not any(isinstance(m, Matched) for m in self.core.to_prefill):
            assert found, "a row waits for something"
            assert any(isinstance(order, DeletePages) for order in self.orders) or best > 0
        self.turn()

    @rule(data=st.data())
    def unlease(self, data: Any) -> None:
        if self.row:
            row = data.draw(st.integers(1, self.row))
            self.asked.pop(row, None)
            self.core.unlease(row)
            self.turn()

    @rule(pages=st.integers(1, 9))
    def reclaim(self, pages: int) -> None:
        self.core.reclaim(pages * PAGE_BYTES)
        self.turn()

    @rule(data=st.data())
    def lose(self, data: Any) -> None:
        """The engine has lost a page."""
        if self.engine:
            self.core.lost((data.draw(st.sampled_from(sorted(self.engine))),))
            self.turn()

    @rule()
    def flush(self) -> None:
        self.core.spill.flush()
        self.turn()

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.turn()

    @precondition(lambda self: self.orders)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def disk_works(self, fails: bool) -> None:
        """The disk does the next of its orders, or fails at it."""
        match order := self.orders.pop(0):
            case WritePage() if fails:
                self.core.page_written(PageWritten(order.page, 0, "no space left"))
            case WritePage():
                piece = piece_of(order.blob)
                self.disk[order.record.chain] = (piece, order.record)
                self.core.page_written(PageWritten(order.page, FILE_BYTES))
            case FetchPage():
                held = None if fails else self.disk.get(order.chain)
                self.core.page_fetched(PageFetched(order.page, None if held is None else blob_of(held[0])))
            case DeletePages():
                for chain in order.chains:
                    self.disk.pop(chain, None)
        self.turn()

    @rule()
    def restart(self) -> None:
        """RAM is gone; the disk had done what it was told, or the half of it."""
        for order in self.orders:
            if isinstance(order, DeletePages):
                for chain in order.chains:
                    self.disk.pop(chain, None)
        closed = {record.parent for _, record in self.disk.values()} - set(self.disk)
        assert all(len(self.prefix(record)) <= PAGE for _, record in self.disk.values() if record.parent in closed)
        self.start()

    # --- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "core"):
            self.core.check_integrity(self.engine)
            assert self.core.tree.disk_bytes <= self.disk_budget
            assert len(self.disk) * FILE_BYTES <= self.disk_budget + FILE_BYTES
            for row in self.asked:
                assert row in self.core.restore._rows, "a row that was not answered waits"


class CheckpointMachine(CacheMachine):
    """The same with state that cannot be cut."""

    checkpoints = True


def common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Length of the longest equal start."""
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


def blob_of(piece: Piece) -> PageBlob:
    """A page whose bytes are its whole prefix, and its namespace."""
    namespace, prefix, state = piece
    layout = PageLayout(
        (len(prefix) - 1) // PAGE * PAGE,
        len(prefix),
        ((ArraySpec("int32", (len(prefix),)),),),
        (StateSpec((), (ArraySpec("uint8", (len(namespace),)),)),) if state else None,
    )
    return PageBlob(layout, (token_key(prefix), namespace.encode()))


def piece_of(blob: PageBlob) -> Piece:
    """The piece of such a page."""
    tokens = tuple(memoryview(bytes(blob.buffers[0])).cast("i").tolist())
    return bytes(blob.buffers[1]).decode(), tokens, blob.layout.state is not None


TestPlain = CacheMachine.TestCase
TestCheckpoints = CheckpointMachine.TestCase
TestPlain.settings = TestCheckpoints.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
