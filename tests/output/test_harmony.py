"""gpt-oss: channels become thoughts, answers and calls."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_troupe.runtime.output.harmony import HarmonySplitter
from mlx_troupe.runtime.output.parts import Tools
from mlx_troupe.runtime.text.dialect import HARMONY_MARKERS

from .reading import Read
from .samples import TOOLS

THOUGHT = "<|channel|>analysis<|message|>I think.<|end|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>Hello, wörld"
CALL = '<|start|>assistant<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{"why": "done"}'


def split(text, cut=None, *, eager=False, opened=False, tools=TOOLS):
    pieces = [text] if cut is None else [text[at : at + cut] for at in range(0, len(text), cut)]
    return Read(HarmonySplitter(Tools(tools) if tools else None, opened=opened, eager=eager), pieces)


@pytest.mark.parametrize("cut", [None, 1, 2, 5])
@pytest.mark.parametrize("end", ["", "<|return|>"])
def test_a_thought_and_an_answer(cut, end):
    found = split(THOUGHT + ANSWER + end, cut)
    assert (found.thought, found.text, found.calls) == ("I think.", "Hello, wörld", [])


@pytest.mark.parametrize("cut", [None, 1, 2, 5])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("end", ["", "<|call|>"])
def test_calls(cut, eager, end):
    found = split(THOUGHT + CALL + "<|call|>" + CALL + end, cut, eager=eager)
    assert found.calls == [("stop", {"why": "done"})] * 2
    assert (found.thought, found.text) == ("I think.", "")


def test_the_recipient_may_stand_in_the_role():
    text = '<|start|>assistant to=functions.stop<|channel|>commentary json<|message|>{"why": 1}<|call|>'
    assert split(text).calls == [("stop", {"why": 1})]


def test_a_preamble_is_part_of_the_answer():
    found = split("<|channel|>commentary<|message|>I will look.<|end|>" + CALL)
    assert found.text == "I will look."
    assert found.calls == [("stop", {"why": "done"})]


def test_a_cut_call_is_text():
    found = split(THOUGHT + CALL[:-4])
    assert found.calls == []
    assert found.text == '{"why": "do'


def test_a_function_that_was_not_offered_is_text():
    assert split(CALL.replace("stop", "rm")).text == '{"why": "done"}'
    assert split(CALL, tools=None).text == '{"why": "done"}'


def test_text_without_channels_is_an_answer():
    for cut in (None, 1):
        assert split("plain text", cut).text == "plain text"
        assert split("goes on", cut, opened=True).text == "goes on"


def test_no_mark_leaks():
    found = split(THOUGHT + ANSWER + "<|end|>" + THOUGHT + "<|start|><|start|><|channel|>" + ANSWER)
    assert "<|" not in found.text + found.thought


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from([*HARMONY_MARKERS, THOUGHT, ANSWER, CALL, "a", " ", "{", "}", "<|", "to=functions.stop"])),
    st.integers(0, 10**9),
)
def test_never_raises_and_cutting_does_not_matter(fragments, seed):
    text = "".join(fragments)
    whole = split(text)
    rng = random.Random(seed)
    pieces = []
    while text:
        size = rng.randrange(1, 9)
        pieces, text = [*pieces, text[:size]], text[size:]
    assert Read(HarmonySplitter(Tools(TOOLS), opened=False, eager=False), pieces).all == whole.all


@pytest.mark.parametrize("cut", [None, 1, 6])
def test_a_streamed_call_that_breaks_is_text_as_well(cut):
    text = "<|channel|>commentary to=functions.stop<|message|>" + '{"why": "a'
    whole, eager = split(text, cut), split(text, cut, eager=True)
    assert eager.text == whole.text == '{"why": "a'
    assert eager.made.calls == eager.made.broken == 1
    assert whole.calls == []


@pytest.mark.parametrize("cut", [None, 1, 6])
def test_blanks_around_arguments_are_the_same_streamed_and_whole(cut):
    text = '<|channel|>commentary to=functions.stop<|message|>\n {"why": "a"} \n<|call|>'
    assert split(text, cut, eager=True).all == split(text, cut).all == ("", "", [["stop", '\n {"why": "a"} \n']])
