"""Turns a loaded model into an engine, on the MLX thread: layout, overlap and speed are measured here, once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import msgspec

from ..engine_protocol import EngineFacts
from ..models.fused import fuse_projections
from ..models.light_cpu import lighten
from .device import backend, device_memory, empty_pool
from .footprint import kv_layout
from .host_threads import choose_threads
from .kernels import ragged_attention
from .kv.pages import checkpoint_bytes, form_of, has_state, token_bytes, unstorable
from .kv.staged import StagedRow
from .overlap import choose_overlap
from .probe import choose_layout
from .prompt_reader import PromptReader
from .traced import make_engine

if TYPE_CHECKING:
    from ..clock import Clock
    from ..config import RuntimeConfig
    from ..peers import SharedLimit
    from ..tracing import Tracer
    from .engine import MlxEngine

logger = logging.getLogger(__name__)

SPEED_PROBE_TOKENS = 32


def build_engine(
    model: Any,
    config: RuntimeConfig,
    clock: Clock,
    *,
    vocab_size: int,
    context_length: int,
    xtc_special: tuple[int, ...] = (),
    tracer: Tracer | None = None,
    limit: SharedLimit | None = None,
) -> MlxEngine:
    """Measure the model and make its engine. Runs a few short forwards.

    Args:
        model: mlx-lm's, weights evaluated.
        vocab_size: number of scored ids according to the tokenizer or config; the model's own output decides.
        context_length: most tokens of one row.
        xtc_special: ids that XTC never drops.
        tracer: records every step, if there is one.
        limit: MLX's memory limit, if other engines of the process set it as well.
    """
    if backend() == "cpu":
        lighten(model)
        choose_threads(model, clock)
    if backend() == "cuda":
        fuse_projections(model)
    layout = choose_layout(model, ragged_attention())
    new_batch = layout.new_batch(model, config.length_classes)
    overlap = choose_overlap(config.overlap, model, layout.shapes, new_batch)
    tried, seconds = _tried(model, clock)
    scored = _scored_ids(model) or vocab_size
    reader = PromptReader(model, scored)
    facts = EngineFacts(
        vocab_size=scored,
        context_length=context_length,
        page_bytes=token_bytes(tried.caches) * config.page_tokens,
        checkpoints=has_state(tried.caches),
        checkpoint_bytes=checkpoint_bytes(tried.caches),
        cache_reason=unstorable(tried.caches),
        overlap=overlap.mode,
        overlap_reason=overlap.reason,
        layout=layout.describe(),
        prefill_token_s=seconds,
        kv=kv_layout(model, layout.shapes, config.length_classes),
        **device_memory(),
        embeds=reader.embeds,
    )
    empty_pool()
    facts = msgspec.structs.replace(facts, base_bytes=mx.get_active_memory())
    kernel = "none" if layout.kernel is None else type(layout.kernel).__name__
    logger.info("rows: %s (%s, %s; ragged kernel: %s)", facts.layout, layout.way, layout.reason, kernel)
    logger.info("overlap: %s (%s)", facts.overlap, facts.overlap_reason)
    return make_engine(
        tracer,
        model,
        new_batch,
        facts,
        page_tokens=config.page_tokens,
        clock=clock,
        xtc_special=xtc_special,
        page_form=None if facts.cache_reason else form_of(tried.cut(0, 1)),
        shapes=layout.shapes if layout.together else None,
        reader=reader,
        limit=limit,
    )


def _scored_ids(model: Any) -> int:
    return int(model(mx.array([[0]])).shape[-1])


def _tried(model: Any, clock: Clock) -> tuple[StagedRow, float]:
    """A short prefill, and its seconds a token: the second of two (the first warms up)."""
    seconds = 0.0
    for _ in range(2):
        staged = StagedRow(model)
        began_s = clock.now()
        staged.append([0] * SPEED_PROBE_TOKENS)
        seconds = (clock.now() - began_s) / SPEED_PROBE_TOKENS
    return staged, seconds
