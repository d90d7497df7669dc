"""Percentiles, confidence, outcomes, goodput and the figures of a repeat."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from benchmarks.figures.metrics import METRICS, estimate
from benchmarks.figures.objective import Objective, parse_objective
from benchmarks.figures.outcome import Outcome, error_kind
from benchmarks.figures.summary import Sample, server_figures, summarise
from benchmarks.stats import half_width_95, percentile
from benchmarks.targets.prometheus import parse_metrics


def outcome(**changes):
    facts = {
        "conversation": 0,
        "turn": 0,
        "intended_s": 0.0,
        "sent_s": 0.1,
        "end_s": 2.0,
        "text_times_s": (0.5, 1.0, 1.0, 2.0),
        "tokens": 4,
        "counted_by_server": True,
        "wanted_tokens": 4,
        "prompt_tokens": 10,
        "cached_tokens": 5,
        "finish_reason": "length",
        "error": "",
        "left": False,
    }
    return Outcome(**(facts | changes))


@pytest.mark.parametrize(("percent", "expected"), [(50, 50), (90, 90), (99, 99), (100, 100), (1, 1), (0.5, 1)])
def test_percentiles_are_nearest_rank(percent, expected):
    values = list(range(1, 101))
    random.Random(0).shuffle(values)
    assert percentile(values, percent) == expected


def test_percentiles_of_few_and_none():
    assert percentile([7.0], 1) == percentile([7.0], 99) == 7.0
    assert percentile([1.0, 2.0], 50) == 1.0
    assert percentile([1.0, 2.0], 51) == 2.0
    assert math.isnan(percentile([], 50))


def test_confidence_covers_the_mean_as_often_as_it_says():
    rng = random.Random(3)
    hits = 0
    for _ in range(4000):
        values = [rng.gauss(10.0, 2.0) for _ in range(5)]
        hits += abs(statistics.fmean(values) - 10.0) <= half_width_95(values)
    assert hits / 4000 == pytest.approx(0.95, abs=0.015)


def test_confidence_of_one_repeat_is_unknown():
    assert half_width_95([1.0]) is None
    assert str(estimate([1.0])) == "1"
    assert estimate([None]) is None


def test_times_count_from_the_intention():
    one = outcome(intended_s=-1.0)
    assert one.first_token_s == 1.5
    assert one.send_lag_s == 1.1
    assert one.whole_s == 3.0
    assert one.per_token_s == 0.5
    assert one.gaps_s() == [0.5, 1.0]


def test_one_token_has_no_time_per_token():
    assert outcome(tokens=1, text_times_s=(0.5,)).per_token_s is None
    assert outcome(tokens=0, text_times_s=()).first_token_s is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("HTTP 429: b'slow down'", "HTTP 429"),
        ("no connection: refused", "no connection"),
        ("connection lost: reset", "connection lost"),
        ("no end within 3 s", "timeout"),
        ("error event: {}", "error event"),
        ("the stream ended without a finish reason", "no finish reason"),
        ("refused, overloaded: full", "refused, overloaded"),
        ("Expecting value: line 1", "bad answer"),
    ],
)
def test_errors_count_by_kind(text, kind):
    expected = kind.removeprefix("refused, ")
    assert error_kind(text) == expected


def test_objective_judges_every_bound():
    assert parse_objective("ttft=0.5,e2e=10") == Objective(0.5, None, None, 10.0)
    assert Objective(ttft=0.5, tpot=0.5).met_by(outcome())
    for bounds in ({"ttft": 0.4}, {"tpot": 0.4}, {"gap": 0.9}, {"e2e": 1.9}):
        assert not Objective(**({"ttft": None, "tpot": None} | bounds)).met_by(outcome())
    assert not Objective(ttft=9.0).met_by(outcome(error="HTTP 500: x"))
    assert not Objective(ttft=9.0).met_by(outcome(left=True))


@pytest.mark.parametrize("text", ["ttft", "speed=1", "ttft=0", "ttft=x", "ttft=nan"])
def test_wrong_objectives(text):
    with pytest.raises(ValueError, match=r"\w"):
        parse_objective(text)


def test_figures_of_a_repeat():
    outcomes = [
        outcome(),
        outcome(intended_s=0.2, tokens=2, text_times_s=(1.2,)),
        outcome(error="HTTP 429: x", text_times_s=(), tokens=0, prompt_tokens=0, cached_tokens=0),
        outcome(left=True, tokens=1, text_times_s=(0.5,), counted_by_server=False),
    ]
    found = summarise(outcomes, Objective(ttft=0.6, tpot=None), wall_s=2.0)
    assert (found.requests, found.completed, found.left, found.errors) == (4, 2, 1, {"HTTP 429": 1})
    assert (found.tokens, found.tokens_per_s, found.requests_per_s) == (7, 3.5, 1.0)
    assert (found.prompt_tokens, found.cached_tokens) == (30, 15)
    assert found.ttft_ms == {"p50": 500.0, "p90": 1000.0, "p99": 1000.0, "max": 1000.0}
    assert (found.goodput_per_s, found.goodput_share) == (0.5, 0.3333)
    assert found.e2e_ms["max"] == 2000.0
    assert found.tokens_per_arrival == 1.4
    assert found.count_source == "usage+pieces"
    assert found.short == 1
    assert all(metric.of(found) is not None for metric in METRICS if not metric.name.startswith("token"))


def test_figures_of_nothing():
    found = summarise([], Objective(), wall_s=0.0)
    assert (found.tokens_per_s, found.goodput_share, found.ttft_ms["p50"]) == (0.0, 0.0, None)


def test_server_figures_grow_or_peak():
    samples = [
        Sample(0.0, {"steps_total": 10.0, "memory_bytes": 5.0}),
        Sample(1.0, {"steps_total": 15.0, "memory_bytes": 9.0}),
        Sample(2.0, {"steps_total": 30.0, "memory_bytes": 6.0, "late_total": 2.0}),
    ]
    assert server_figures(samples) == {"steps_total": 20.0, "memory_bytes_max": 9.0, "late_total": 2.0}


def test_exposition_is_summed_over_labels():
    text = '# TYPE a counter\na_total{x="1"} 2\na_total{x="2"} 3\n# TYPE b gauge\nb NaN\n# TYPE c gauge\nc 4\n'
    assert parse_metrics(text) == {"a_total": 5.0, "c": 4.0}
    assert parse_metrics("<html>") == {}
