"""Constrained rows in the batch, on a random model: their output matches, and neighbours are not touched."""

import asyncio
import json

import pytest

from mlx_troupe.runtime import Generation, InvalidRequest, Runtime, SamplingParams, TroupeError
from mlx_troupe.runtime.grammar import Grammar
from tests.models.tiny import build_tiny

GREEDY = SamplingParams(temperature=0)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 999}, "e": {"enum": ["x", "y"]}},
    "required": ["n", "e"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny("llama", tmp_path_factory.mktemp("llama"))


def each_overlap(test):
    """Run a test with a runtime of each kind of overlap; a runtime is entered and left by one task."""

    @pytest.mark.parametrize("overlap", ["auto", "build", "off"])
    async def run(folder, overlap):
        async with Runtime(model=str(folder), overlap=overlap, max_rows=16) as runtime:
            await test(runtime)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def schema(seed: int, **fields) -> Generation:
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    sampling = SamplingParams(temperature=1.5, seed=seed)
    return Generation(prompt="hello", grammar=grammar, sampling=sampling, **({"max_tokens": 200} | fields))


@each_overlap
async def test_constrained_and_free_rows_share_the_batch(runtime):
    free = Generation(prompt="once upon", sampling=GREEDY, max_tokens=60, ignore_eos=True)
    alone = (await runtime.complete(free)).choices[0].tokens
    answers = await asyncio.gather(*(runtime.complete(schema(seed)) for seed in range(12)), runtime.complete(free))
    assert answers.pop().choices[0].tokens == alone
    for answer in answers:
        assert answer.choices[0].finish_reason == "stop"
        found = json.loads(answer.text)
        assert 0 <= found["n"] <= 999
        assert found["e"] in ("x", "y")


@each_overlap
async def test_choices_of_one_request_have_their_own_state(runtime):
    answer = await runtime.complete(schema(3, n=4))
    texts = {choice.text for choice in answer.choices}
    assert len(texts) > 1
    assert all(json.loads(text) for text in texts)


@each_overlap
async def test_a_grammar_that_fails_ends_its_own_row_alone(runtime):
    bomb = Generation(
        prompt="x",
        grammar=Grammar("regex", "(((a{1,1000}){1,1000}){1,1000})b"),
        sampling=SamplingParams(temperature=0, logit_bias=((ord("a") - 33, 100.0),)),
        max_tokens=3000,
    )
    results = await asyncio.gather(
        runtime.complete(bomb), *(runtime.complete(schema(seed)) for seed in range(4)), return_exceptions=True
    )
    assert isinstance(results[0], TroupeError)
    assert results[0].code == "grammar_failed"
    assert all(json.loads(answer.text) for answer in results[1:])
    assert json.loads((await runtime.complete(schema(9))).text)


@each_overlap
async def test_max_tokens_cuts_with_length(runtime):
    answer = await runtime.complete(schema(1, max_tokens=3))
    assert answer.choices[0].finish_reason == "length"
    assert answer.text.lstrip().startswith("{")


@each_overlap
async def test_min_tokens_does_not_break_a_grammar_that_is_over(runtime):
    grammar = Grammar("choice", '["a"]')
    answer = await runtime.complete(Generation(prompt="x", grammar=grammar, min_tokens=5, max_tokens=10))
    assert answer.text == "a"


@each_overlap
async def test_a_constrained_row_must_be_allowed_to_end(runtime):
    with pytest.raises(InvalidRequest) as caught:
        await runtime.complete(schema(1, ignore_eos=True))
    assert caught.value.param == "ignore_eos"


@each_overlap
async def test_cancelling_constrained_rows_leaves_nothing_behind(runtime):
    async def left(seed: int) -> None:
        async with runtime.stream(schema(seed)) as events:
            await events.take()

    await asyncio.gather(*(left(seed) for seed in range(8)))
    assert json.loads((await runtime.complete(schema(5))).text)
