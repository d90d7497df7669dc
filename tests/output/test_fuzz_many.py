"""A hundred thousand outputs and grammars made of hostile pieces: nothing raises, nothing hangs."""

import asyncio
import random
import time

import pytest

from mlx_troupe.runtime.errors import InvalidRequest
from mlx_troupe.runtime.grammar import Grammar, GrammarFailed
from mlx_troupe.runtime.output.harmony import HarmonySplitter
from mlx_troupe.runtime.output.parts import Tools
from mlx_troupe.runtime.text.dialect import HARMONY_MARKERS
from mlx_troupe.runtime.text.stop_strings import StopMatcher
from tests.grammar.made import TOKENS, allowed, service

from .reading import Read, splitter
from .samples import TOOLS, WRITTEN
from .test_splitter import FRAGMENTS

SPLITS, GRAMMARS, STOPS = 70_000, 10_000, 20_000
GRAMMAR_PIECES = (
    *(
        '{"type":',
        '"object"',
        '"string"',
        '"array"',
        '"properties":{',
        '"items":',
        '"$ref":"#"',
        '"anyOf":[',
        '"enum":[',
    ),
    *('"pattern":"', "a{1,1000}", "(", ")", "*", "+", "|", "[", "]", "{", "}", ",", '"', "\\", "start: ", "root ::= "),
    *(
        "/",
        "%json ",
        "%regex ",
        "<|end|>",
        "<[1-9]>",
        "\n",
        " ",
        "x",
        "ü",
        "\u2028",
        "\x00",
        "1e999",
        "-",
        "null",
        "true",
    ),
)


def pieces(rng, source, most):
    return [rng.choice(source) for _ in range(rng.randrange(most))]


@pytest.mark.heavy
def test_outputs():
    rng = random.Random(1)
    parsers = sorted(WRITTEN)
    slowest = 0.0
    for number in range(SPLITS):
        began = time.perf_counter()
        eager = bool(number % 2)
        if number % 5:
            made = splitter(rng.choice(parsers), in_thought=rng.random() < 0.3, eager=eager)
            Read(made, pieces(rng, FRAGMENTS, 25))
        else:
            made = HarmonySplitter(Tools(TOOLS), opened=rng.random() < 0.2, eager=eager)
            Read(made, pieces(rng, [*HARMONY_MARKERS, *FRAGMENTS, "to=functions.stop", "final", "analysis"], 25))
        slowest = max(slowest, time.perf_counter() - began)
    assert slowest < 2


@pytest.mark.heavy
async def test_grammars():
    rng = random.Random(2)
    grammars = service(cache_bytes=1 << 20)
    enforced = 0
    for _ in range(GRAMMARS):
        kind = rng.choice(["json_schema", "regex", "lark", "gbnf", "choice"])
        text = "".join(pieces(rng, GRAMMAR_PIECES, 14))
        async with asyncio.timeout(20):
            try:
                (constraint,) = await grammars.constraints(Grammar(kind, text), 1)
            except InvalidRequest:
                continue
        enforced += 1
        try:
            for _ in range(20):
                found = allowed(constraint)
                assert found <= set(range(len(TOKENS)))
                if not found:
                    break
                constraint.accept(rng.choice(sorted(found)))
        except GrammarFailed:
            pass
    grammars.close()
    assert enforced > GRAMMARS // 50


@pytest.mark.heavy
def test_stop_strings():
    rng = random.Random(3)
    for _ in range(STOPS):
        stops = ["".join(pieces(rng, "ab\n", 5)) or "a" for _ in range(rng.randrange(1, 5))]
        matcher = StopMatcher(stops)
        text = pieces(rng, ("a", "b", "\n", "ab", "ba", "c"), 30)
        said = ""
        for piece in text:
            said += matcher.feed(piece)
            if matcher.matched is not None:
                break
        else:
            said += matcher.flush()
        whole = "".join(text)
        assert whole.startswith(said)
        if matcher.matched is None:
            assert said == whole
        assert not any(stop in said for stop in stops)
