"""Builds the six actors of one engine by its settings and facts, and makes them known to each other."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from .admission import AdmissionActor
from .admission_core import AdmissionCore, AdmissionPolicy
from .cache_core import CachePolicy, CacheStoreCore
from .cache_store import CacheStoreActor
from .decode import DecodeActor
from .decode_core import DecodeCore
from .executor import ExecutorActor
from .memory_enforcer import MemoryEnforcerActor
from .memory_guard import MemoryGuard
from .memory_ledger import MemoryLedger, no_others, pages_budget_bytes
from .prefill import PrefillActor
from .prefill_core import PrefillCore
from .prefill_cost import ChunkCost
from .prefill_keep import KeepRules, spacing_pages
from .prefill_policy import PrefillPolicy
from .transients import ChunkMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..runtime.clock import Clock
    from ..runtime.config import RuntimeConfig
    from ..runtime.engine_protocol import Engine, EngineFacts
    from ..runtime.peers import Peer
    from .cache_disk import CacheDisk
    from .executor import JobThread

logger = logging.getLogger(__name__)


class Cast(NamedTuple):
    """The actors of a troupe."""

    admission: AdmissionActor
    prefill: PrefillActor
    decode: DecodeActor
    executor: ExecutorActor
    cache_store: CacheStoreActor
    memory_enforcer: MemoryEnforcerActor


def cast_for(
    config: RuntimeConfig,
    facts: EngineFacts,
    engine: Engine,
    thread: JobThread,
    clock: Clock,
    footprint: Callable[[], int] | None,
    disk: CacheDisk | None,
    peer: Peer | None = None,
) -> Cast:
    """The actors of one engine, knowing each other and, through `peer`, what other engines of the process do."""
    memory = MemoryEnforcerActor(
        facts,
        config.memory,
        config.memory_limit_bytes,
        inbox=config.inbox,
        clock=clock,
        footprint=footprint,
    )
    base_bytes = _own_base(facts, memory, peer)
    line_bytes = memory.limits.admission_bytes - (0 if peer is None else peer.others_bytes())
    pages_bytes = pages_budget_bytes(config.prefix_cache_bytes, line_bytes, base_bytes)
    store = CacheStoreCore(cache_policy(config, facts, pages_bytes), clock=clock)
    ledgers = _ledgers(config, facts, memory, base_bytes, store.tree.budget_bytes, peer)
    page_tokens = config.page_tokens if store.tree.budget_bytes else 0
    keep = KeepRules(
        page_tokens,
        facts.checkpoints,
        spacing_pages(facts.page_bytes, facts.checkpoint_bytes),
        config.page_tokens if facts.checkpoints else 0,
    )
    gates = AdmissionPolicy(config.max_rows, config.max_queue, config.queue_timeout_s)
    policy = PrefillPolicy(config.prefill_chunk_tokens, config.stall_target_s, config.fair_share)
    chunks = _chunk_memory(facts, memory)
    prefill = PrefillCore(policy, ChunkCost(facts.prefill_token_s), keep=keep, clock=clock, memory=chunks, peer=peer)
    guard = None if ledgers is None else MemoryGuard(ledgers(), memory.on_device(memory.limits.preempt_bytes))
    pages_of_output = 0 if facts.checkpoints else page_tokens  # a finished row's state is not at a known token
    decode = DecodeCore(overlap=facts.overlap != "off", page_tokens=pages_of_output, clock=clock, guard=guard)
    admission = AdmissionCore(gates, clock=clock, ledger=None if ledgers is None else ledgers(), peer=peer)
    inbox = config.inbox
    cast = Cast(
        admission=AdmissionActor(admission, inbox=inbox, clock=clock),
        prefill=PrefillActor(prefill, inbox=inbox, clock=clock),
        decode=DecodeActor(decode, inbox=inbox, clock=clock),
        executor=ExecutorActor(engine, thread, inbox=inbox, clock=clock),
        cache_store=CacheStoreActor(store, inbox=inbox, clock=clock, disk=disk),
        memory_enforcer=memory,
    )
    _connect(cast)
    return cast


def cache_policy(config: RuntimeConfig, facts: EngineFacts, budget_bytes: int) -> CachePolicy:
    """The cache's settings for a model, with what memory leaves it; one whose caches cannot be stored gets no cache."""
    worth = facts.cache_reason is None and (facts.page_bytes > 0 or facts.checkpoints)
    if facts.cache_reason is not None:
        logger.info("prefix cache: off, %s", facts.cache_reason)
    return CachePolicy(
        page_tokens=config.page_tokens,
        page_bytes=facts.page_bytes,
        budget_bytes=budget_bytes if worth else 0,
        checkpoints=facts.checkpoints,
        checkpoint_bytes=facts.checkpoint_bytes,
        spill=config.cache_spill,
        spill_queue=config.cache_spill_queue,
        restore_timeout_s=config.cache_restore_timeout_s,
        max_stores=config.cache_max_stores,
    )


def _ledgers(
    config: RuntimeConfig,
    facts: EngineFacts,
    memory: MemoryEnforcerActor,
    base_bytes: int,
    pages_bytes: int,
    peer: Peer | None,
) -> Callable[[], MemoryLedger] | None:
    """Makes an actor's own ledger; None when the model's layout is not known."""
    kv = facts.kv
    if kv is None:
        return None
    return lambda: MemoryLedger(
        kv,
        base_bytes=base_bytes,
        pages_bytes=pages_bytes,
        line_bytes=memory.limits.admission_bytes,
        chunk_tokens=config.prefill_chunk_tokens,
        others=no_others if peer is None else peer.others_bytes,
    )


def _own_base(facts: EngineFacts, memory: MemoryEnforcerActor, peer: Peer | None) -> int:
    """What is there when none of this engine's rows are: of what other engines hold, nothing."""
    if peer is None:
        return memory.base_bytes
    own_bytes = peer.own_bytes if peer.others_loaded else facts.base_bytes
    peer.overhead_bytes = max(0, memory.base_bytes - facts.base_bytes)
    peer.line_bytes = lambda: memory.limits.admission_bytes
    return peer.overhead_bytes + own_bytes


def _chunk_memory(facts: EngineFacts, memory: MemoryEnforcerActor) -> ChunkMemory | None:
    if facts.kv is None:
        return None
    limits = memory.limits
    return ChunkMemory(
        facts.kv,
        limits.slack_bytes,
        line_bytes=memory.on_device(limits.admission_bytes),
        abort_bytes=memory.on_device(limits.abort_bytes),
    )


def _connect(cast: Cast) -> None:
    admission, prefill, decode = cast.admission, cast.prefill, cast.decode
    executor, cache_store, memory = cast.executor, cast.cache_store, cast.memory_enforcer
    admission.prefill, admission.cache_store = prefill.ref, cache_store.ref
    prefill.admission, prefill.decode, prefill.cache_store = admission.ref, decode.ref, cache_store.ref
    decode.admission, decode.prefill = admission.ref, prefill.ref
    decode.executor, decode.cache_store = executor.ref, cache_store.ref
    executor.decode, executor.cache_store, executor.memory_enforcer = decode.ref, cache_store.ref, memory.ref
    cache_store.admission, cache_store.prefill, cache_store.executor = admission.ref, prefill.ref, executor.ref
    memory.admission, memory.cache_store = admission.ref, cache_store.ref
    memory.prefill, memory.decode, memory.executor = prefill.ref, decode.ref, executor.ref
