"""Masks computed side by side are those computed one by one, and what fails fails alone."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mlx_troupe.runtime.grammar import Grammar, GrammarFailed, GrammarService, ThoughtPlan
from mlx_troupe.runtime.grammar.masks import MaskFiller
from mlx_troupe.runtime.grammar.thought import ThoughtConstraint

VOCAB = 300
TOKENS = [*(bytes([byte]) for byte in range(256)), *(b"token%d" % number for number in range(VOCAB - 257)), b"<end>"]
END = frozenset({VOCAB - 1})


@pytest.fixture
def service():
    made = GrammarService(lambda: TOKENS, END, END)
    yield made
    made.close()


async def rows_of(service, count: int):
    schemas = [
        {"type": "object", "properties": {f"k{row}": {"type": "integer"}}, "required": [f"k{row}"]}
        for row in range(count)
    ]
    return [(await service.constraints(Grammar("json_schema", json.dumps(schema)), 1))[0] for schema in schemas]


def masks(filler: MaskFiller, constraints) -> tuple[np.ndarray, list[Exception | None]]:
    words = np.zeros((len(constraints), -(-VOCAB // 32)), np.uint32)
    return words, filler.fill(constraints, words)


class Broken:
    def fill(self, words: np.ndarray) -> None:
        raise RuntimeError("no mask")


async def test_side_by_side_is_one_by_one(service) -> None:
    one, many = await rows_of(service, 9), await rows_of(service, 9)
    alone, together = MaskFiller(1), MaskFiller(4)
    for text in b'{"k':
        for constraint in (*one, *many):
            constraint.accept(text)
        wanted, found = masks(alone, one), masks(together, many)
        assert np.array_equal(wanted[0], found[0])
        assert found[0].any(axis=1).all()
        assert found[1] == [None] * 9


async def test_a_row_that_fails_fails_alone(service) -> None:
    rows = await rows_of(service, 4)
    with pytest.raises(GrammarFailed):
        rows[1].accept(ord("x"))
    found, errors = masks(MaskFiller(4), [*rows, Broken()])
    assert [type(error) for error in errors] == [type(None), GrammarFailed, type(None), type(None), RuntimeError]
    assert np.array_equal(found[0], masks(MaskFiller(1), await rows_of(service, 1))[0][0])


async def test_thoughts_stand_beside_answers(service) -> None:
    plan = ThoughtPlan(is_open=True, start=(1,), end=(2,), closing=(2,), budget=None)
    rows = [ThoughtConstraint(plan, inner, END) for inner in await rows_of(service, 3)]
    rows[1].accept(2)
    rows[2].accept(2)
    assert rows[0].matcher is None
    assert rows[1].matcher is not None
    found, errors = masks(MaskFiller(4), rows)
    assert errors == [None] * 3
    brace = np.zeros_like(found[1])
    rows[1].fill(brace)
    assert np.array_equal(found[1], brace)
    assert found[0].sum() > found[1].sum()
