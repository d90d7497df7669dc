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
from mlx_troupe.runtime.engine.kv.together import FREE_PADDING, MOST_TOKENS, can_share, packs, prefill_together
from mlx_troupe.runtime.engine.probe import choose_layout
from mlx_troupe.runtime.messages.decode import ChunksResult, StepResult
from mlx_troupe.runtime.messages.executor import Chunk, JoinRow, LeaveRow, StepPlan

from .conftest import VOCAB, random_prompts
from .driver import GREEDY

KV_ONLY = ["llama", "qwen3", "deepseek_v2", "deepseek_v3", "gemma3_text", "gpt_oss", "gemma3n"]


@given(st.lists(st.integers(1, 512), min_size=1, max_size=40))
def test_packs_hold_each_prompt_once_and_bound_padding(lengths) -> None:
    found = packs(lengths)
    assert sorted(index for pack in found for index in pack) == list(range(len(lengths)))
    for pack in found:
        block = max(lengths[index] for index in pack) * len(pack)
        tokens = sum(lengths[index] for index in pack)
        assert len(pack) == 1 or block <= min(MOST_TOKENS, tokens * 4 // 3 + FREE_PADDING)


@pytest.mark.parametrize("architecture", KV_ONLY)
def test_rows_prefilled_together_decode_as_alone(architecture, tiny_model, solo) -> None:
    model = tiny_model(architecture)
    shapes = learn_shapes(model)
    prompts = random_prompts(7, seed=21, lengths=(2, 3, 9, 17, 33, 40, 90))
    batch = RowBatch(model, shapes, ())
    for row, staged in enumerate(prefill_together(model, shapes, [prompt[:-1] for prompt in prompts])):
        batch.join(row, staged)
    last = [prompt[-1] for prompt in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(20):
        order = batch.order
        logits = batch.forward(mx.array([[0 if row is None else last[row]] for row in order]))[:, -1]
        for row, token in zip(order, mx.argmax(logits, axis=-1).tolist(), strict=True):
            if row is not None:
                outputs[row].append(token)
                last[row] = token
    assert outputs == [solo(architecture, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_a_prompt_goes_on_after_a_shared_first_chunk(architecture, tiny_model, solo) -> None:
    """First chunks together, later ones alone: windows and caches go on rightly."""
    model = tiny_model(architecture)
    shapes = learn_shapes(model)
    prompts = random_prompts(3, seed=4, lengths=(120, 90))
    rows = prefill_together(model, shapes, [prompt[:n] for prompt, n in zip(prompts, (30, 7, 19), strict=True)])
    batch = RowBatch(model, shapes, ())
    for row, (staged, prompt) in enumerate(zip(rows, prompts, strict=True)):
        while staged.length < len(prompt) - 1:
            staged.append(prompt[staged.length : min(len(prompt) - 1, staged.length + 25)])
        batch.join(row, staged)
    order = batch.order
    tokens = mx.array([[0 if row is None else prompts[row][-1]] for row in order])
    found = mx.argmax(batch.forward(tokens)[:, -1], axis=-1).tolist()
    by_row = dict(zip(order, found, strict=True))
    assert [by_row[row] for row in range(3)] == [solo(architecture, prompt, 1)[0] for prompt in prompts]


def test_recurrent_models_do_not_share(tiny_model) -> None:
    assert not can_share(learn_shapes(tiny_model("qwen3_next")))
    assert not choose_layout(tiny_model("mamba")).together
    assert choose_layout(tiny_model("llama")).together


def test_engine_computes_short_chunks_together_and_keeps_faults_apart(tiny_model, solo, monkeypatch) -> None:
    """One plan with many first chunks: one forward; when it fails, each prompt runs alone."""
    from mlx_troupe.runtime.engine import engine as module

    model = tiny_model("llama")
    prompts = random_prompts(6, seed=8, lengths=(5, 20, 33))
    calls = []
    together = module.prefill_together

    def counted(*args):
        calls.append(len(args[2]))
        return together(*args)

    for broken in (False, True):
        engine = build_engine(model, RuntimeConfig(), MonotonicClock(), vocab_size=VOCAB, context_length=4096)

        def failing(*_):
            raise RuntimeError("out of memory")

        monkeypatch.setattr(module, "prefill_together", failing if broken else counted)
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
