"""The sampling pass and the mask pass: logits to tokens for all rows."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlx_troupe.runtime.engine.sampling import RowSampler
from mlx_troupe.runtime.grammar import Grammar, GrammarService
from mlx_troupe.runtime.sampling_params import SamplingParams

from ..grammar_masks import schema, tokens_of
from ..sampling import measure
from .case import Case, best_s, extra_s

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlx_troupe.runtime.constraint import Constraint

    from .machine import MachineRates

MIXES = ("greedy", "temperature", "top_p", "mixed")
LOGIT_BYTES = 4


def sampling_cases(rates: MachineRates, rows: list[int], vocab: int, repeats: int) -> Iterator[Case]:
    """Each mix at each number of rows."""
    for mix in MIXES:
        for count in rows:
            seconds = measure(mix, count, vocab, repeats, peer=False).ours_ms / 1e3
            floor_s, floor = rates.floor_s(float(count * vocab * LOGIT_BYTES))
            case = f"{mix}, {count} rows of {vocab:,}"
            yield Case(part="sampling", case=case, measured_s=seconds, floor_s=floor_s, floor=f"logits once: {floor}")


def mask_cases(rates: MachineRates, rows: list[int], vocab: int, repeats: int) -> Iterator[Case]:
    """Masks filled on the host from grammars, then a greedy pass under them, less one without."""
    constraints, service = asyncio.run(_constraints(max(rows), vocab))
    words = np.zeros((max(rows), -(-vocab // 32)), np.uint32)
    for count in rows:

        def fill(count: int = count) -> None:
            for row in range(count):
                constraints[row].fill(words[row])

        seconds = best_s(fill, repeats=repeats)
        floor_s = count * words.shape[1] * 4 / rates.host_bytes_s
        floor = f"mask words written at {rates.host_bytes_s / 1e9:.3g} GB/s"
        yield Case(
            part="mask, host", case=f"{count} schemas, {vocab:,} ids", measured_s=seconds, floor_s=floor_s, floor=floor
        )
        yield _masked(rates, words[:count], count, vocab, repeats)
    service.close()


def _masked(rates: MachineRates, words: np.ndarray, rows: int, vocab: int, repeats: int) -> Case:
    sampler = RowSampler(vocab)
    for row in range(rows):
        sampler.join(row, SamplingParams(temperature=0.0), [], 0)
    logits = mx.random.normal((rows, vocab))
    mx.eval(logits)
    order: list[int | None] = list(range(rows))

    def draw(*, masked: bool) -> None:
        allowed = mx.array(words) if masked else None
        sampler.sample(logits, order, allowed=allowed).tokens.tolist()

    draw(masked=True)
    seconds = extra_s(lambda: draw(masked=False), lambda: draw(masked=True), repeats)
    floor_s, floor = rates.floor_s(float(words.nbytes + 2 * rows * vocab * LOGIT_BYTES))
    return Case(
        part="mask, device",
        case=f"{rows} rows of {vocab:,}, beyond a greedy pass",
        measured_s=seconds,
        floor_s=floor_s,
        floor=f"mask read, logits read and written: {floor}",
    )


async def _constraints(rows: int, vocab: int) -> tuple[list[Constraint], GrammarService]:
    tokens = tokens_of(vocab, random.Random(1))
    service = GrammarService(lambda: tokens, frozenset({vocab - 1}), frozenset({vocab - 1}))
    grammars = [Grammar("json_schema", schema(row)) for row in range(rows)]
    return [(await service.constraints(grammar, 1))[0] for grammar in grammars], service
