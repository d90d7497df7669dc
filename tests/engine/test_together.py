"""Short prompts computed in one padded forward: the same KV as alone."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_troupe.runtime.clock import MonotonicClock
from mlx_troupe.runtime.config import RuntimeConfig
from mlx_troupe.runtime.engine.build import build_engine
from mlx_troupe.runtime.engine.kv.batch import RowBatch
from mlx_troupe.runtime.engine.kv.shapes import learn_shapes
from mlx_troupe.runtime.engine.kv.staged import StagedRow
from mlx_troupe.runtime.engine.kv.together import (
    FREE_PADDING,
    MOST_PLACES,
    MOST_TOKENS,
    Piece,
    can_share,
    extend_together,
    packs,
)
from mlx_troupe.runtime.engine.probe import choose_layout
from mlx_troupe.runtime.messages.decode import ChunksResult, StepResult
from mlx_troupe.runtime.messages.executor import Chunk, JoinRow, LeaveRow, StepPlan

from .conftest import VOCAB, random_prompts
from .driver import GREEDY

KV_ONLY = ["llama", "qwen3", "deepseek_v2", "deepseek_v3", "gemma3_text", "gpt_oss", "gemma3n"]


@given(st.lists(st.tuples(st.integers(1, 512), st.integers(0, 9000)), min_size=1, max_size=40))
def test_packs_hold_each_piece_once_and_bound_padding_and_copies(sizes) -> None:
    lengths, depths = zip(*sizes, strict=True)
    found = packs(lengths, depths)
    assert sorted(index for pack in found for index in pack) == list(range(len(lengths)))
    for pack in found:
        longest = max(lengths[index] for index in pack)
        deepest = max(depths[index] for index in pack)
        tokens = sum(lengths[index] for index in pack)
        if len(pack) > 1:
            assert longest * len(pack) <= min(MOST_TOKENS, tokens * 4 // 3 + FREE_PADDING)
            assert (longest + deepest) * len(pack) <= MOST_PLACES


def test_even_pieces_form_one_pack() -> None:
    assert [len(pack) for pack in packs([50] * 32, [0, 40] * 16)] == [32]


def decoded(model, staged: list[StagedRow], last: list[int], steps: int) -> list[list[int]]:
    """What rows in one batch say after their last prompt token."""
    batch = RowBatch(model, learn_shapes(model), ())
    for row, one in enumerate(staged):
        batch.join(row, one)
    fed = list(last)
    outputs: list[list[int]] = [[] for _ in fed]
    for _ in range(steps):
        order = batch.order
        logits = batch.forward(mx.array([[0 if row is None else fed[row]] for row in order]))[:, -1]
        for row, token in zip(order, mx.argmax(logits, axis=-1).tolist(), strict=True):
            if row is not None:
                outputs[row].append(token)
                fed[row] = token
    return outputs


@pytest.mark.parametrize("architecture", KV_ONLY)
def test_rows_prefilled_together_decode_as_alone(architecture, tiny_model, solo) -> None:
    model = tiny_model(architecture)
    prompts = random_prompts(7, seed=21, lengths=(2, 3, 9, 17, 33, 40, 90))
    rows = [StagedRow(model) for _ in prompts]
    pieces = [Piece(row, prompt[:-1]) for row, prompt in zip(rows, prompts, strict=True)]
    extend_together(model, learn_shapes(model), pieces)
    outputs = decoded(model, rows, [prompt[-1] for prompt in prompts], 20)
    assert outputs == [solo(architecture, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("architecture", KV_ONLY)
def test_pieces_alternate_between_together_and_alone(architecture, tiny_model, solo) -> None:
    """Rows of every depth, past windows too: what one forward leaves, the next one of either kind goes on from."""
    model = tiny_model(architecture)
    shapes = learn_shapes(model)
    prompts = random_prompts(5, seed=4, lengths=(150, 120, 90, 60, 12))
    rows = [StagedRow(model) for _ in prompts]
    sizes = [(1, 30, 7, 19, 2), (40, 1, 9, 3, 2), (25, 5, 31, 3, 4)]
    for turn in range(12):
        wanted = zip(rows, prompts, sizes[turn % 3], strict=True)
        pieces = [Piece(row, prompt[row.length : min(len(prompt) - 1, row.length + n)]) for row, prompt, n in wanted]
        pieces = [piece for piece in pieces if piece.tokens]
        if turn % 4 == 3:
            for row, tokens in pieces:
                row.append(tokens)
        elif pieces:
            extend_together(model, shapes, pieces)
    for row, prompt in zip(rows, prompts, strict=True):
        if row.length < len(prompt) - 1:
            row.append(prompt[row.length : -1])
    outputs = decoded(model, rows, [prompt[-1] for prompt in prompts], 6)
    assert outputs == [solo(architecture, prompt, 6) for prompt in prompts]


def test_recurrent_models_do_not_share(tiny_model) -> None:
    assert not can_share(learn_shapes(tiny_model("qwen3_next")))
    assert not choose_layout(tiny_model("mamba")).together
    assert choose_layout(tiny_model("llama")).together


def test_engine_computes_short_chunks_together_and_keeps_faults_apart(tiny_model, solo, monkeypatch) -> None:
    """One plan with many first chunks: one forward; when it fails, each prompt runs alone."""
    from mlx_troupe.runtime.engine import chunks as module

    model = tiny_model("llama")
    prompts = random_prompts(6, seed=8, lengths=(5, 20, 33))
    calls = []
    together = module.extend_together

    def counted(*args):
        calls.append(len(args[2]))
        return together(*args)

    for broken in (False, True):
        engine = build_engine(model, RuntimeConfig(), MonotonicClock(), vocab_size=VOCAB, context_length=4096)

        def failing(*_):
            raise RuntimeError("out of memory")

        monkeypatch.setattr(module, "extend_together", failing if broken else counted)
        events: list[object] = []
        chunks = tuple(Chunk(row, tuple(prompt[:-1]), 0) for row, prompt in enumerate(prompts))
        engine.run(StepPlan(1, chunks=chunks), events.append)
        outcomes = next(event for event in events if isinstance(event, ChunksResult)).outcomes
        assert all(outcome.error is None and outcome.seconds > 0 for outcome in outcomes)
        joins = tuple(JoinRow(row, row, len(p) - 1, p[-1], GREEDY) for row, p in enumerate(prompts))
        rows = tuple(range(len(prompts)))
        engine.run(StepPlan(2, rows, joins, discards=rows), events.append)
        engine.run(StepPlan(3, leaves=tuple(LeaveRow(row) for row in rows)), events.append)
        tokens = next(event.tokens for event in events if isinstance(event, StepResult))
        assert list(tokens) == [solo("llama", prompt, 1)[0] for prompt in prompts]
    assert calls == [6]
