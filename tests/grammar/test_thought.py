"""A thought is free, is closed when its budget is used up, and the grammar begins after it."""

import pytest

from mlx_troupe.runtime.grammar import Grammar, ThoughtPlan
from mlx_troupe.runtime.grammar.thought import ThoughtConstraint

from .made import ENDS, TOKENS, allowed, service

OPEN, CLOSE, LINE = 300 - 50, 300 - 49, ord("\n")


def plan(**settings):
    parts = {"is_open": True, "start": (OPEN,), "end": (CLOSE,), "closing": (LINE, CLOSE)}
    return ThoughtPlan(**(parts | settings))


@pytest.fixture
async def inner():
    grammars = service()
    (constraint,) = await grammars.constraints(Grammar("choice", '["ok"]'), 1)
    yield constraint
    grammars.close()


def feed(constraint, tokens):
    for token in tokens:
        assert token in allowed(constraint)
        constraint.accept(token)


def test_a_thought_may_hold_anything_but_the_end():
    constraint = ThoughtConstraint(plan(), None, ENDS)
    assert allowed(constraint) == set(range(len(TOKENS))) - ENDS


async def test_the_grammar_begins_after_the_thought(inner):
    constraint = ThoughtConstraint(plan(), inner, ENDS)
    feed(constraint, [*b"hm { hm", CLOSE])
    assert allowed(constraint) == {ord("o")}
    feed(constraint, b"ok")
    assert allowed(constraint) == ENDS


async def test_a_model_may_think_first_or_answer_at_once(inner):
    constraint = ThoughtConstraint(plan(is_open=False), inner, ENDS)
    assert allowed(constraint) == {ord("o"), OPEN}
    feed(constraint, b"o")
    assert allowed(constraint) == {ord("k")}


async def test_an_opening_of_several_tokens_is_completed(inner):
    constraint = ThoughtConstraint(plan(is_open=False, start=(OPEN, ord("t"))), inner, ENDS)
    feed(constraint, [OPEN])
    assert allowed(constraint) == {ord("t")}
    feed(constraint, [ord("t"), ord("x"), CLOSE])
    assert allowed(constraint) == {ord("o")}


async def test_a_thought_is_closed_at_its_budget(inner):
    constraint = ThoughtConstraint(plan(budget=3), inner, ENDS)
    feed(constraint, b"abc")
    assert allowed(constraint) == {LINE}
    feed(constraint, [LINE])
    assert allowed(constraint) == {CLOSE}
    feed(constraint, [CLOSE])
    assert allowed(constraint) == {ord("o")}


def test_a_budget_of_nothing_closes_at_once_and_the_answer_is_free():
    constraint = ThoughtConstraint(plan(budget=0), None, ENDS)
    feed(constraint, [LINE, CLOSE])
    assert allowed(constraint) == set(range(len(TOKENS)))


def test_a_thought_that_closes_itself_in_time_is_left_alone():
    constraint = ThoughtConstraint(plan(budget=3), None, ENDS)
    feed(constraint, [ord("a"), CLOSE, *b"abcdefgh"])
    assert allowed(constraint) >= ENDS


async def test_an_end_of_several_tokens(inner):
    constraint = ThoughtConstraint(plan(end=(CLOSE, ord("!"))), inner, ENDS)
    feed(constraint, [CLOSE, ord("?"), CLOSE, ord("!")])
    assert allowed(constraint) == {ord("o")}
