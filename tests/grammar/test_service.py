"""Grammars are compiled within bounds, or refused by name; what comes out of them always matches."""

import asyncio
import json
import re
import threading

import pytest

from mlx_troupe.runtime.errors import InvalidRequest
from mlx_troupe.runtime.grammar import Grammar, GrammarFailed
from mlx_troupe.runtime.grammar import service as service_module
from mlx_troupe.runtime.grammar.spec import MAX_GRAMMAR_BYTES

from .made import END, ENDS, OTHER_END, allowed, service, walk

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
async def grammars():
    found = service()
    yield found
    found.close()


async def one(grammars, grammar):
    (constraint,) = await grammars.constraints(grammar, 1)
    return constraint


@pytest.mark.parametrize("seed", range(20))
async def test_a_schema_gives_valid_json(grammars, seed):
    text = walk(await one(grammars, Grammar("json_schema", json.dumps(PERSON))), seed)
    found = json.loads(text)
    assert set(found) == {"name", "age"}
    assert 0 <= found["age"] <= 150
    assert len(found["name"]) <= 8


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", "[ab]{2,4}c"), "[ab]{2,4}c"),
        (Grammar("choice", '["yes", "no", "\\u00fcn\\"\\n"]'), 'yes|no|ün"\n'),
        (Grammar("lark", 'start: "x" /[0-9]{1,3}/'), "x[0-9]{1,3}"),
        (Grammar("gbnf", 'root ::= "a" [0-9] ("b" | "c")'), "a[0-9][bc]"),
    ],
)
async def test_other_kinds_give_what_they_say(grammars, grammar, pattern):
    for seed in range(20):
        assert re.fullmatch(pattern, walk(await one(grammars, grammar), seed).decode())


async def test_json_object_begins_with_a_brace(grammars):
    assert allowed(await one(grammars, Grammar("json_object"))) == {ord("{")}


async def test_whitespace_is_bounded(grammars):
    constraint = await one(grammars, Grammar("json_object"))
    constraint.accept(ord("{"))
    assert allowed(constraint) & {ord(" "), ord("\n")}
    constraint.accept(ord("\n"))
    count = 0
    while ord(" ") in allowed(constraint) and count < 100:
        constraint.accept(ord(" "))
        count += 1
    assert count == 16
    assert not allowed(constraint) & set(b" \n\t\r")


async def test_every_end_token_ends_and_nothing_after_it_fails(grammars):
    constraint = await one(grammars, Grammar("choice", '["a"]'))
    constraint.accept(ord("a"))
    assert allowed(constraint) == ENDS
    constraint.accept(OTHER_END)
    constraint.accept(ord("z"))  # the row is in flight once more
    assert allowed(constraint) == ENDS


async def test_a_forbidden_token_is_an_error(grammars):
    constraint = await one(grammars, Grammar("choice", '["a"]'))
    with pytest.raises(GrammarFailed):
        constraint.accept(ord("b"))
    with pytest.raises(GrammarFailed):
        allowed(constraint)


async def test_each_row_has_its_own_matcher(grammars):
    first, second = await grammars.constraints(Grammar("choice", '["ab"]'), 2)
    first.accept(ord("a"))
    third = await one(grammars, Grammar("choice", '["ab"]'))
    assert allowed(first) == {ord("b")}
    assert allowed(second) == allowed(third) == {ord("a")}


def nested(depth: int) -> str:
    return '{"anyOf":[' * depth + '{"type":"null"}' + "]}" * depth


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "strin"}'),
        ("json_schema", '{"$ref": "#"}'),
        ("json_schema", '{"$ref": "http://localhost/schema.json"}'),
        ("json_schema", '{"not": {"type": "string"}}'),
        ("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}'),
        ("json_schema", '{"enum": []}'),
        ("json_schema", "false"),
        ("json_schema", "[1]"),
        ("json_schema", "{"),
        ("json_schema", nested(40)),
        ("json_schema", nested(5000)),
        ("json_schema", "[" * 100_000),
        ("json_schema", json.dumps({"type": "string", "pattern": "(?=a)b"})),
        ("json_schema", json.dumps({"type": "string", "pattern": "a" * 10_000})),
        ("json_schema", json.dumps({"enum": [0] * 30_000})),
        ("regex", ""),
        ("regex", "("),
        ("regex", "(" * 8000 + ")" * 8000),
        ("regex", "(" * 4000 + ")" * 4000),
        ("regex", "(?<=a)b"),
        ("regex", "a" * (MAX_GRAMMAR_BYTES + 1)),
        ("regex", "\ud800"),
        ("lark", "start: missing"),
        ("lark", "nonsense"),
        ("lark", "start: " + "(" * 30_000),
        ("gbnf", "((((((("),
        ("gbnf", "root = 1"),
        ("gbnf", "root ::= " + "(" * 20_000),
        ("choice", "[]"),
        ("choice", '[""]'),
        ("choice", "[1]"),
        ("choice", '"a"'),
        ("choice", json.dumps([str(number) for number in range(5000)])),
    ],
)
async def test_what_cannot_be_enforced_is_refused_by_name(grammars, kind, text):
    async with asyncio.timeout(5):
        with pytest.raises(InvalidRequest) as caught:
            await grammars.constraints(Grammar(kind, text, "the_field"), 1)
    assert caught.value.param == "the_field"
    assert len(caught.value.message) < 500
    assert await one(grammars, Grammar("json_object"))


async def test_a_lenient_schema_ignores_what_it_does_not_know(grammars):
    text = json.dumps({"type": "array", "items": {"type": "null"}, "maxItems": 2, "uniqueItems": True})
    with pytest.raises(InvalidRequest):
        await grammars.constraints(Grammar("json_schema", text), 1)
    assert walk(await one(grammars, Grammar("json_schema", text, lenient=True)), 1) is not None


async def test_a_bomb_fails_while_it_runs_and_not_for_ever(grammars):
    constraint = await one(grammars, Grammar("regex", "(((a{1,1000}){1,1000}){1,1000})b"))

    def run():
        for _ in range(100_000):
            assert ord("a") in allowed(constraint)
            constraint.accept(ord("a"))

    with pytest.raises(GrammarFailed):
        run()


async def test_the_cache_is_bounded_by_bytes():
    grammars = service(cache_bytes=200_000)
    for number in range(50):
        await grammars.constraints(Grammar("choice", json.dumps([f"{number}" * 100])), 1)
        assert 0 < grammars.cached_bytes <= 200_000
    grammars.close()


async def test_a_grammar_is_compiled_once(grammars, monkeypatch):
    compiled = []
    real = service_module.new_matcher
    monkeypatch.setattr(service_module, "new_matcher", lambda *a: compiled.append(1) or real(*a))
    for _ in range(5):
        await grammars.constraints(Grammar("choice", '["a"]'), 1)
    assert len(compiled) == 1
    await grammars.constraints(Grammar("regex", '["a"]'), 1)
    assert len(compiled) == 2


async def test_compiling_is_bounded_in_time(monkeypatch):
    grammars = service(timeout_s=0.01)
    release = threading.Event()
    monkeypatch.setattr(service_module, "new_matcher", lambda *_: release.wait(10))
    with pytest.raises(InvalidRequest, match="took more than"):
        await grammars.constraints(Grammar("json_object"), 1)
    release.set()
    grammars.close()


async def test_a_tokenizer_without_exact_tokens_is_refused():
    grammars = service_module.GrammarService(lambda: None, frozenset(), frozenset({END}))
    with pytest.raises(InvalidRequest) as caught:
        await grammars.constraints(Grammar("json_object"), 1)
    assert caught.value.param == "response_format"
    grammars.close()
