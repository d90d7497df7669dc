"""`rewind`: rows whose newest tokens are taken back carry on as if they had never been fed."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest

from mlx_troupe.runtime.engine.kv.solo import SoloBatch

from .conftest import CLASSES, TABLE, random_prompts
from .rows import Rows
from .steps import staged_row

TOKENS = 18
PROMPTS = random_prompts(16)[:6]
KV_ONLY = ["llama", "deepseek_v2", "deepseek_v3", "gemma3_text", "gpt_oss", "gemma3n"]
SEVERAL_CLASSES = ["llama", "deepseek_v3", "gemma3_text", "gpt_oss", "qwen3_next", "falcon_h1", "mamba"]
RECURRENT = ["qwen3_next", "lfm2", "mamba", "falcon_h1"]
ROW_BY_ROW = ["llama", "gemma3_text", "qwen3_next", "mamba2"]


def speculate(rows: Rows, seed: int, *, share: float = 0.6) -> None:
    """Rows join, verify drafts of random worth, decode plainly in between, and leave."""
    rng = random.Random(seed)
    waiting = list(enumerate(PROMPTS))
    while waiting or rows.alive:
        if waiting and (rng.random() < 0.4 or not rows.alive):
            rows.join(*waiting.pop(0))
        if rng.random() < share:
            rows.speculate(rng)
        else:
            rows.step()
        rows.check(rows.alive)
        for row in [row for row in rows.alive if len(rows.outputs[row]) >= TOKENS]:
            rows.leave(row)
        rows.batch.settle()


@pytest.mark.parametrize("architecture", TABLE)
def test_speculation_with_random_acceptance_changes_nothing(architecture, new_batch, tiny_model, solo) -> None:
    rows = Rows(tiny_model(architecture), new_batch(architecture, ()), lambda p, n: solo(architecture, p, n))
    speculate(rows, seed=1)


@pytest.mark.parametrize("architecture", SEVERAL_CLASSES)
def test_speculation_in_several_classes(architecture, new_batch, tiny_model, solo) -> None:
    rows = Rows(tiny_model(architecture), new_batch(architecture, CLASSES), lambda p, n: solo(architecture, p, n))
    speculate(rows, seed=1)


@pytest.mark.parametrize("architecture", ROW_BY_ROW)
def test_speculation_row_by_row(architecture, tiny_model, solo) -> None:
    model = tiny_model(architecture)
    speculate(Rows(model, SoloBatch(model), lambda p, n: solo(architecture, p, n)), seed=2)


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss"])
def test_holes_far_beyond_a_windows_slack(architecture, new_batch, tiny_model, solo) -> None:
    """60 blocks of 4 tokens, 3 of them wrong for all rows but one: many times the places a window layer has."""
    rows = Rows(tiny_model(architecture), new_batch(architecture, ()), lambda p, n: solo(architecture, p, n))
    for row, length in enumerate((5, 40, 33)):
        rows.join(row, random_prompts(1, seed=row, lengths=(length,))[0])
    for turn in range(60):
        right = {row: 3 if row == turn % 3 else 0 for row in rows.alive}
        rows.verify(right)
        rows.batch.check_integrity()
    rows.check()
    assert min(len(said) for said in rows.outputs.values()) > 90


@pytest.mark.parametrize("architecture", KV_ONLY)
def test_rewinding_right_after_a_join(architecture, new_batch, tiny_model, solo) -> None:
    """Prompt tokens can be taken back and fed again, as an exact hit of a cached prompt does."""
    prompts = [random_prompts(1, seed=row, lengths=(length,))[0] for row, length in enumerate((40, 9, 70))]
    rows = Rows(tiny_model(architecture), new_batch(architecture, ()), lambda p, n: solo(architecture, p, n))
    for row, prompt in enumerate(prompts):
        rows.join(row, prompt)
        rows.refeed(row, 1 if row else 3)
        rows.check()
    rows.step(12)
    rows.check()


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss"])
def test_a_window_layer_refuses_to_go_back_further_than_it_holds(architecture, new_batch, tiny_model, solo) -> None:
    """In one call or in several; what is refused changes nothing, in no class."""
    rows = Rows(tiny_model(architecture), new_batch(architecture), lambda p, n: solo(architecture, p, n))
    rows.join(0, random_prompts(1, seed=0, lengths=(5,))[0])
    rows.join(1, random_prompts(1, seed=1, lengths=(130,))[0])
    rows.step(3)
    with pytest.raises(ValueError, match="window layer"):
        rows.batch.rewind({0: 2, 1: 100})
    rows.check()
    rows.step(8)
    rows.check()
    length = rows.batch.length(1)
    for _ in range(8):
        with suppress(ValueError):
            rows.batch.rewind({1: 4})
    with pytest.raises(ValueError, match="window layer"):
        rows.batch.rewind({1: 4})
    taken = length - rows.batch.length(1)
    assert taken >= 8, "what was decoded since the join can be taken back"
    for token in (rows.prompts[1] + rows.outputs[1])[length - taken : length]:
        rows.feed({1: token})
    rows.step(20)
    rows.check()


def test_chunked_caches_go_back_as_far_as_they_hold(tiny_model, solo) -> None:
    """llama4's attention chunks are 16 tokens: older keys are dropped, so beyond that only a checkpoint helps."""
    model = tiny_model("llama4")
    rows = Rows(model, SoloBatch(model), lambda p, n: solo("llama4", p, n))
    rows.join(0, random_prompts(1, seed=0, lengths=(30,))[0])
    rows.step(5)
    assert rows.batch.length(0) == 34
    rows.refeed(0, 2)  # to the start of the chunk
    rows.step(1)
    with pytest.raises(ValueError, match="take a checkpoint"):
        rows.batch.rewind({0: 4})
    rows.batch.checkpoint()
    rows.step(7)
    rows.refeed(0, 7)
    rows.step(30)
    rows.check()


def test_more_than_a_row_has_is_refused(new_batch, tiny_model) -> None:
    batch = new_batch("llama")
    batch.join(0, staged_row(tiny_model("llama"), [20, 21, 22]))
    for count in (3, -1):
        with pytest.raises(ValueError, match="cannot take back"):
            batch.rewind({0: count})
    assert batch.length(0) == 2


@pytest.mark.parametrize("architecture", RECURRENT)
def test_recurrent_rows_want_a_checkpoint(architecture, new_batch, tiny_model, solo) -> None:
    rows = Rows(tiny_model(architecture), new_batch(architecture), lambda p, n: solo(architecture, p, n))
    rows.join(0, PROMPTS[3])
    rows.step(2)
    with pytest.raises(ValueError, match="checkpoint"):
        rows.batch.rewind({0: 1})
    rows.batch.checkpoint()
    rows.step(2)
    with pytest.raises(ValueError, match="since the checkpoint"):
        rows.batch.rewind({0: 3})
    rows.join(1, PROMPTS[2])  # membership changed: the checkpoint is void
    with pytest.raises(ValueError, match="checkpoint"):
        rows.batch.rewind({0: 1})
    rows.step(6)
    rows.check()


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v2", "deepseek_v3"])
def test_pages_exported_after_rewinds_hold_the_kept_tokens(architecture, new_batch, tiny_model, solo) -> None:
    """Of a row with holes in its buffer, every page equals the one of a row prefilled alone."""
    rows = Rows(tiny_model(architecture), new_batch(architecture), lambda p, n: solo(architecture, p, n))
    for row in range(4):
        rows.join(row, PROMPTS[row])
    rng = random.Random(5)
    for _ in range(6):
        rows.speculate(rng)
    for row in rows.alive:
        tokens = rows.prompts[row] + rows.outputs[row]
        alone = staged_row(rows.model, tokens)
        assert alone.length == rows.batch.length(row)
        for page in range(alone.length // 4):
            for mine, theirs in zip(rows.batch.export(row, page, 4), alone.page(page, 4), strict=True):
                for a, b in zip(mine, theirs, strict=True):
                    assert np.allclose(np.array(a), np.array(b), rtol=1e-3, atol=1e-3)
    rows.step(4)
    rows.check()
