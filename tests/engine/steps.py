"""Drives a Batch by hand: prefill, join, decode greedily."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_troupe.runtime.engine.kv.staged import StagedRow

if TYPE_CHECKING:
    from mlx_troupe.runtime.engine.kv.batch import Batch


def staged_row(model: Any, prompt: list[int], *, chunk: int = 64) -> StagedRow:
    """All but the last token of a prompt, prefilled alone."""
    staged = StagedRow(model)
    tokens = prompt[:-1]
    for start in range(0, len(tokens), chunk):
        staged.append(tokens[start : start + chunk])
    return staged


def decode_all(model: Any, batch: Batch, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Rows join one a step, and leave after `count` greedy tokens."""
    outputs: list[list[int]] = [[] for _ in prompts]
    last: dict[int, int] = {}
    waiting = list(range(len(prompts)))
    while waiting or last:
        if waiting:
            row = waiting.pop(0)
            batch.join(row, staged_row(model, prompts[row]))
            last[row] = prompts[row][-1]
        order = batch.order
        logits = batch.forward(mx.array([[0 if row is None else last[row]] for row in order]))[:, -1]
        for row, token in zip(order, mx.argmax(logits, axis=-1).tolist(), strict=True):
            if row is not None:
                outputs[row].append(token)
                last[row] = token
        for row in [row for row in last if len(outputs[row]) == count]:
            batch.leave(row)
            del last[row]
        batch.settle()
    return outputs
