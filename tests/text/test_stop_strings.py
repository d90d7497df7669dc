"""Stop strings: the automaton against a naive oracle, whatever the deltas."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_troupe.runtime.errors import InvalidRequest
from mlx_troupe.runtime.text.stop_strings import MAX_STOP_CHARS, MAX_STOPS, StopMatcher

LETTERS = "abé語"


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule word for word: the first end of any stop string, there the longest."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end - len(stop)], stop
    return text, None


def longest_open_suffix(text: str, stops: list[str]) -> int:
    """Characters at the end of `text` that begin some stop string."""
    sizes = range(len(text), 0, -1)
    return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in stops)), 0)


def fed(matcher: StopMatcher, deltas: list[str]) -> str:
    """All the text that comes out of `deltas`."""
    out = ""
    for delta in deltas:
        out += matcher.feed(delta)
        if matcher.matched is not None:
            return out
    return out + matcher.flush()


texts = st.lists(st.text(LETTERS, max_size=6), max_size=12)
stop_lists = st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=6)


@given(texts, stop_lists)
def test_equals_the_naive_rule_for_any_deltas(deltas, stops):
    matcher = StopMatcher(stops)
    assert (fed(matcher, deltas), matcher.matched) == naive("".join(deltas), stops)


@given(texts, stop_lists)
def test_holds_back_only_what_begins_a_stop_string(deltas, stops):
    matcher, seen, sent = StopMatcher(stops), "", ""
    for delta in deltas:
        seen += delta
        sent += matcher.feed(delta)
        if matcher.matched is not None:
            return
        assert sent == seen[: len(seen) - longest_open_suffix(seen, stops)]


@pytest.mark.parametrize(
    ("text", "stops", "before", "stop"),
    [
        ("xaab", ["aab", "ab"], "x", "aab"),  # both end here: the longer one began first
        ("xabc", ["abc", "ab"], "x", "ab"),  # the shorter one is there first
        ("abcdef", ["abcdef", "cd"], "ab", "cd"),  # likewise inside a longer one
        ("hello world", ["world", "lo w"], "hel", "lo w"),
        ("STOP now", ["STOP"], "", "STOP"),
        ("日本語。終", ["語。"], "日本", "語。"),
        ("aaaa", ["aaa"], "", "aaa"),
        ("ababac", ["abac"], "ab", "abac"),
        ("one\n\ntwo", ["\n\n"], "one", "\n\n"),
    ],
)
def test_known_cases(text, stops, before, stop):
    for size in range(1, len(text) + 1):
        matcher = StopMatcher(stops)
        deltas = [text[start : start + size] for start in range(0, len(text), size)]
        assert (fed(matcher, deltas), matcher.matched) == (before, stop)


@pytest.mark.parametrize("stops", [[""], ["a", ""], ["a"] * (MAX_STOPS + 1), ["a" * (MAX_STOP_CHARS + 1)]])
def test_refuses(stops):
    with pytest.raises(InvalidRequest) as caught:
        StopMatcher(stops)
    assert caught.value.param == "stop"


def test_a_lone_string_is_no_list():
    with pytest.raises(TypeError):
        StopMatcher("END")


def test_the_worst_stop_strings_cost_no_more():
    # 16 strings that share all but their last character, and a text that never gets there: a search that starts
    # anew at every character would do 16 x 512 comparisons for each.
    matcher = StopMatcher(["a" * (MAX_STOP_CHARS - 1) + chr(98 + index) for index in range(MAX_STOPS)])
    began = time.perf_counter()
    assert len(matcher.feed("a" * 100_000)) == 100_000 - (MAX_STOP_CHARS - 1)
    assert time.perf_counter() - began < 2
