"""Thoughts and tool calls come out of the text, whatever it holds and however it was cut."""

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .reading import Read, read, splitter
from .samples import CALLS, WRITTEN, dialect

PARSERS = sorted(WRITTEN)
FRAGMENTS = sorted(
    {"<think>", "</think>", '{"', '"}', "\\", '"', "\n", " ", "a", "[", "]", "{", "}", "ü", "\u2028", "<", "=", ":"}
    | {mark for parser in PARSERS for mark in (dialect(parser).call_start, dialect(parser).call_end) if mark}
    | {
        '{"name": "stop", "arguments": {',
        "<function=stop>",
        "<parameter=why>",
        "</parameter>",
        "</function>",
        "call:stop{",
    }
    | {"stop[ARGS]{", "[stop(why=1)]", '<invoke name="stop">', "stop<arg_key>", "<arg_value>", "<|tool_call_begin|>"}
)


@pytest.mark.parametrize("cut", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("parser", PARSERS)
def test_two_parallel_calls(parser, eager, cut):
    found = read("<think>\nhm\n</think>\n\nI look. " + WRITTEN[parser], cut, parser=parser, eager=eager)
    assert found.calls == CALLS
    assert found.text == "I look."
    assert found.thought == "hm"
    assert len(set(found.ids)) == 2


@pytest.mark.parametrize("parser", PARSERS)
def test_every_way_to_cut_gives_the_same(parser):
    text = "<think>a\n</think>\nb " + WRITTEN[parser] + "\n"
    whole = read(text, parser=parser)
    for place in range(len(text)):
        assert Read(splitter(parser), [text[:place], text[place:]]).all == whole.all


@pytest.mark.parametrize("parser", PARSERS)
def test_a_cut_call_is_text(parser):
    text = "See: " + WRITTEN[parser]
    first_end = len(text) // 3
    found = read(text[:first_end], parser=parser)
    assert found.calls == []
    assert found.text == text[:first_end]


@pytest.mark.parametrize("parser", PARSERS)
def test_a_function_that_was_not_offered_is_text(parser):
    text = WRITTEN[parser].replace("get_weather", "rm_rf").replace("stop", "rm_rf")
    found = read(text, parser=parser)
    assert found.calls == []
    assert found.text == text


@pytest.mark.parametrize("parser", PARSERS)
def test_without_tools_calls_are_left_as_they_are(parser):
    found = read(WRITTEN[parser], 5, parser=parser, tools=None)
    assert found.text == WRITTEN[parser]


def test_arguments_are_streamed_as_they_come():
    made = splitter(eager=True)
    assert made.feed('<tool_call>{"name": "stop", "arguments": ')[:] == []
    (opening, piece) = made.feed('{"why": "a')
    assert (opening.name, opening.arguments, piece.arguments) == ("stop", "", '{"why": "a')
    (piece,) = made.feed(" long")
    assert (piece.id, piece.arguments) == ("", " long")
    (piece,) = made.feed('"}}')
    assert piece.arguments == '"}'


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("cut", [None, 1, 4])
def test_a_closing_mark_inside_an_argument_does_not_close(eager, cut):
    call = '<tool_call>{"name": "stop", "arguments": {"why": "</tool_call> \\" <tool_call> }{"}}</tool_call> after'
    found = read(call, cut, eager=eager)
    assert found.calls == [("stop", {"why": '</tool_call> " <tool_call> }{'})]
    assert found.text == "after"


@pytest.mark.parametrize("cut", [None, 1])
def test_a_closing_mark_inside_an_xml_parameter(cut):
    text = "<tool_call>\n<function=stop>\n<parameter=why>\na </tool_call> b\n</parameter>\n</function>\n</tool_call>"
    assert read(text, cut, parser="qwen3_coder").calls == [("stop", {"why": "a </tool_call> b"})]


@pytest.mark.parametrize("cut", [None, 1, 3])
@pytest.mark.parametrize(
    "text",
    [
        "Write `<tool_call>` to call a tool, then `</tool_call>`.",
        "<tool_call> is a mark",
        "a <tool_call",
        "<tool_call>{not json}</tool_call> and more",
        '<tool_call>{"name": "stop", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "stop", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": 5}</tool_call>',
        "<tool_call>[]</tool_call>",
        "<tool_call>[1]</tool_call>",
        "</tool_call>",
    ],
)
def test_marks_in_prose_are_prose(text, cut):
    found = read(text, cut)
    assert found.calls == []
    assert found.text == text


def test_a_call_after_a_broken_one_is_found():
    found = read('<tool_call>{broken}</tool_call> then <tool_call>{"name": "stop", "arguments": {}}</tool_call>')
    assert found.calls == [("stop", {})]
    assert found.text == "<tool_call>{broken}</tool_call> then"


def test_a_call_whose_closing_mark_is_missing_is_a_call_if_whole():
    for eager in (False, True):
        assert read('<tool_call>{"name": "stop", "arguments": {}}', eager=eager).calls == [("stop", {})]


@pytest.mark.parametrize("cut", [None, 1, 2])
@pytest.mark.parametrize(
    ("text", "opened", "thought", "answer"),
    [
        ("<think>\nwhy\n</think>\n\nbecause", False, "why", "because"),
        ("why\n</think>\n\nbecause", True, "why", "because"),
        ("no thought", False, "", "no thought"),
        ("<think>cut", False, "cut", ""),
        ("cut", True, "cut", ""),
        ("<think></think>x", False, "", "x"),
        ("a <think>b</think> c <think>d</think> e", False, "bd", "ace"),
        ("x</think>y", False, "", "xy"),
        ("a < b <think", False, "", "a < b <think"),
        ("  \n", False, "", "  \n"),
        ("a\n\n b \n", False, "", "a\n\n b \n"),
    ],
)
def test_thoughts(text, opened, thought, answer, cut):
    found = read(text, cut, in_thought=opened, tools=None)
    assert found.thought == thought
    assert found.text == answer


def test_a_model_that_does_not_think_keeps_its_tags():
    assert read("<think>a</think>", thinks=False, tools=None).text == "<think>a</think>"


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=30), st.sampled_from(PARSERS), st.integers(0, 10**9), st.booleans()
)
def test_never_raises_and_cutting_does_not_matter(fragments, parser, seed, opened):
    text = "".join(fragments)
    whole = read(text, parser=parser, in_thought=opened)
    rng = random.Random(seed)
    pieces = []
    while text:
        size = rng.randrange(1, 9)
        pieces, text = [*pieces, text[:size]], text[size:]
    assert Read(splitter(parser, in_thought=opened), pieces).all == whole.all
    eager = Read(splitter(parser, in_thought=opened, eager=True), pieces)
    assert eager.thought == whole.thought or parser == "json_tools"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([piece for piece in FRAGMENTS if piece.strip()]), max_size=20))
def test_nothing_is_lost_without_marks(fragments):
    text = "".join(fragments)
    assert read(text, 3, tools=None, thinks=False).text == text


@pytest.mark.parametrize("parser", PARSERS)
def test_hostile_output_takes_linear_time(parser):
    marks = dialect(parser)
    start, end = marks.call_start, marks.call_end or marks.call_start
    hostile = [
        start + '{"name": "stop", "arguments": {"why": "' + end * 20_000,
        (start + "{") * 10_000,
        start + "{" * 100_000 + end,
        start + "[" * 100_000 + end,
        start + "<parameter=a>" * 8_000 + end * 100,
        start + "<function=stop>" + "<parameter=why>a</parameter>" * 3_000 + end,
        start + "call:stop{" + "a:{" * 20_000 + end,
        start + 'call:stop{why:<|"|>' * 3_000 + end,
        start + "<arg_key>" * 10_000 + end,
        start + '<invoke name="stop"><parameter name="a">' * 2_000 + end,
        start + '<atem:invoke name="' * 5_000 + end,
        start + '<atem:invoke name="stop">' + "<atem:parameter " * 5_000 + end,
        start + "[stop(" + "a=1," * 10_000 + ")]" + end,
        start + "[stop(a=" + "-" * 50_000 + "1)]" + end,
        start + "stop(" * 20_000 + end,
        " " * 200_000 + start,
        "<think>" * 30_000,
    ]
    for text in hostile:
        began = time.perf_counter()
        read(text, 4096, parser=parser)
        read(text, 4096, parser=parser, eager=True)
        assert time.perf_counter() - began < 5, text[:80]


def test_a_large_whole_call_is_read_fast():
    arguments = {"why": "line\n" * 100_000}
    text = "<tool_call>" + json.dumps({"name": "stop", "arguments": arguments}) + "</tool_call>"
    began = time.perf_counter()
    assert read(text, 5).calls == [("stop", arguments)]
    assert time.perf_counter() - began < 20


@pytest.mark.parametrize("cut", [1, 5, 1000])
@pytest.mark.parametrize("arguments", ['{"why": "a', '{"why": ', '{"why": nope}}</tool_call> after', "{"])
def test_a_streamed_call_that_breaks_is_text_as_well(arguments, cut):
    """What went out cannot be taken back, but the text agrees with the whole answer's, and no call counts."""
    text = 'See <tool_call>{"name": "stop", "arguments": ' + arguments
    whole, eager = read(text, cut), read(text, cut, eager=True)
    assert whole.calls == []
    assert eager.text == whole.text == text
    assert eager.made.calls == eager.made.broken == 1
    assert whole.made.calls == whole.made.broken == 0


def test_a_whole_call_before_a_broken_one_counts():
    text = '<tool_call>{"name": "stop", "arguments": {}}</tool_call><tool_call>{"name": "stop", "arguments": {"a'
    eager = read(text, 3, eager=True)
    assert (eager.made.calls, eager.made.broken) == (2, 1)
    assert eager.raw_calls[0] == ["stop", "{}"]
