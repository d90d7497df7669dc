"""Log-probabilities and vectors of prompts equal those of mlx_lm's own forward over the whole prompt."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_troupe.runtime.clock import MonotonicClock
from mlx_troupe.runtime.engine import prompt_reader
from mlx_troupe.runtime.engine.engine import MlxEngine
from mlx_troupe.runtime.engine.mlxlm import make_prompt_cache
from mlx_troupe.runtime.engine.prompt_reader import PromptReader, hidden_part
from mlx_troupe.runtime.engine_protocol import EngineFacts
from mlx_troupe.runtime.messages.decode import ChunksResult
from mlx_troupe.runtime.messages.executor import Chunk, StepPlan
from mlx_troupe.runtime.reading import PromptReading

from .bench import Bench
from .conftest import CLASSES, TABLE, VOCAB, prompt_of
from .test_equality import OTHERS

LENGTH = 90
USUAL = ["llama", "gemma3_text", "qwen3_next", "gemma2", "llama4"]
EVERY = [
    name if name in USUAL else pytest.param(name, marks=pytest.mark.heavy) for name in dict.fromkeys([*TABLE, *OTHERS])
]


def read(bench, row, prompt, reading, chunk_tokens, target):
    """All chunks of a prompt; what they gave."""
    found = []
    for start in range(0, target, chunk_tokens):
        end = min(start + chunk_tokens, target)
        following = tuple(prompt[end : end + 1]) if reading.top_logprobs is not None else ()
        outcome = bench.chunk(Chunk(row, tuple(prompt[start:end]), start, reading=reading, following=following))
        assert outcome.error is None
        found.append(outcome.reading)
    return found


@pytest.mark.parametrize("architecture", EVERY)
def test_prompt_logprobs_equal_mlx_lms_log_softmax(architecture, new_engine, tiny_model, monkeypatch):
    monkeypatch.setattr(prompt_reader, "LOGITS_BYTES", 4 * VOCAB * 7)  # slices of seven tokens
    prompt = prompt_of(LENGTH)
    model = tiny_model(architecture)
    logits = model(mx.array([prompt]), cache=make_prompt_cache(model))[0].astype(mx.float32)
    whole = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    bench = Bench(new_engine(architecture))
    entries = [
        entry
        for part in read(bench, 1, prompt, PromptReading(top_logprobs=3), 40, LENGTH - 1)
        for entry in part.logprobs
    ]
    assert [entry.chosen.token for entry in entries] == prompt[1:]
    for place, entry in enumerate(entries):
        assert entry.chosen.logprob == pytest.approx(whole[place, entry.chosen.token], abs=1e-3)
        best = np.sort(whole[place])[::-1][:3]
        assert [top.logprob for top in entry.top] == pytest.approx(list(best), abs=1e-3)
        assert [top.logprob for top in entry.top] == pytest.approx([whole[place, t.token] for t in entry.top], abs=1e-3)


@pytest.mark.parametrize("architecture", [name for name in EVERY if "gemma3n" not in str(name)])
def test_vectors_are_the_models_last_hidden_states(architecture, new_engine, tiny_model):
    prompt = prompt_of(LENGTH)
    model = tiny_model(architecture)
    part = hidden_part(model, VOCAB)
    assert part is not None
    hidden = np.array(part(mx.array([prompt]), cache=make_prompt_cache(model))[0].astype(mx.float32))
    bench = Bench(new_engine(architecture))
    for row, (pooling, wanted) in enumerate([("last", hidden[-1]), ("mean", hidden.sum(axis=0))]):
        last = read(bench, row, prompt, PromptReading(pooling=pooling), 40, LENGTH)[-1]
        found = np.frombuffer(last.vector, np.float32)
        assert found / np.linalg.norm(found) == pytest.approx(wanted / np.linalg.norm(wanted), abs=1e-4)


@pytest.mark.heavy
def test_a_model_without_a_part_in_front_of_its_head_makes_no_vectors(tiny_model):
    assert not PromptReader(tiny_model("gemma3n"), VOCAB).embeds


def test_the_head_of_the_hidden_part_gives_the_logits(tiny_model):
    """The hidden states are those that the head is put on, after the norm."""
    model = tiny_model("llama")
    tokens = mx.array([prompt_of(5)])
    hidden = hidden_part(model, VOCAB)(tokens)
    head = model.lm_head if "lm_head" in model else model.model.embed_tokens.as_linear
    assert mx.allclose(head(hidden), model(tokens), atol=1e-4).item()


def test_slices_keep_the_logits_small(tiny_model):
    reader = PromptReader(tiny_model("llama"), 151_936)
    assert reader.slice_tokens * 151_936 * 4 <= prompt_reader.LOGITS_BYTES
    assert reader.slice_tokens > 100


def test_short_prompts_are_read_beside_others_and_next_to_decoding_rows(new_engine, solo):
    """A reading runs in the same plan as plain chunks and rows, and changes neither."""
    bench = Bench(new_engine())
    plain = prompt_of(20)
    bench.stage(1, plain)
    bench.plan(joins=(bench.joining(1, plain),), discards=(1,))
    bench.steps(3)
    other, read_one = prompt_of(12), prompt_of(11)
    chunks = (
        Chunk(2, tuple(other[:-1]), 0),
        Chunk(3, tuple(read_one), 0, reading=PromptReading(pooling="mean")),
        Chunk(4, tuple(read_one[:-1]), 0, reading=PromptReading(top_logprobs=0), following=(read_one[-1],)),
    )
    bench.plan(chunks=chunks)
    result = bench.said[-1]
    assert isinstance(result, ChunksResult)
    assert [outcome.error for outcome in result.outcomes] == [None] * 3
    assert result.outcomes[0].reading is None
    assert len(result.outcomes[2].reading.logprobs) == 10
    bench.plan(joins=(bench.joining(2, other),), discards=(2, 3, 4))
    bench.steps(6)
    bench.flush()
    assert bench.tokens[2][:6] == solo("llama", other, 6)
    assert bench.tokens[1][:8] == solo("llama", plain, 8)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss"])
def test_short_prompts_become_vectors_in_one_forward(architecture, tiny_model, layout_of, monkeypatch):
    """Ragged ones, mean and last, some of them with tokens before: each is what it is alone."""
    model, layout = tiny_model(architecture), layout_of(architecture)
    facts = EngineFacts(vocab_size=VOCAB, context_length=4096, overlap="off")
    batches = layout.new_batch(model, CLASSES)
    forwards = []
    monkeypatch.setattr(prompt_reader, "extend_together", counted(prompt_reader.extend_together, forwards))

    def vectors(shapes):
        engine = MlxEngine(model, batches, facts, page_tokens=8, clock=MonotonicClock(), shapes=shapes)
        bench = Bench(engine)
        prompts = [prompt_of(length, seed=length) for length in (5, 9, 30, 31, 17)]
        first = Chunk(2, tuple(prompts[2][:12]), 0, reading=PromptReading(pooling="mean"))
        assert bench.chunk(first).error is None
        chunks = []
        for row, prompt in enumerate(prompts):
            start = 12 if row == 2 else 0
            reading = PromptReading(pooling="last" if row % 2 else "mean")
            chunks.append(Chunk(row, tuple(prompt[start:]), start, reading=reading))
        bench.plan(chunks=tuple(chunks))
        outcomes = bench.said[-1].outcomes
        assert [outcome.error for outcome in outcomes] == [None] * 5
        return [np.frombuffer(outcome.reading.vector, np.float32) for outcome in outcomes]

    alone, together = vectors(None), vectors(layout.shapes)
    assert forwards == [5]
    for one, other in zip(alone, together, strict=True):
        assert other == pytest.approx(one, abs=1e-3 * float(np.abs(one).max()))


def counted(run, sizes):
    def extend(model, shapes, pieces, *more):
        sizes.append(len(pieces))
        return run(model, shapes, pieces, *more)

    return extend


def test_no_slice_may_be_larger_than_memory_allows(new_engine, monkeypatch):
    """The peak of a long prompt's reading stays far under its whole logits."""
    monkeypatch.setattr(prompt_reader, "LOGITS_BYTES", 4 * VOCAB * 16)
    engine = new_engine()
    bench = Bench(engine)
    prompt = prompt_of(1500)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    read(bench, 1, prompt, PromptReading(top_logprobs=1), 1499, 1499)
    sliced = mx.get_peak_memory() - before
    bench.engine.run(StepPlan(bench._step + 1, discards=(1,)), bench.hear)
    assert sliced < 2 * 4 * VOCAB * 1499, "three of whole size would be there at once"
