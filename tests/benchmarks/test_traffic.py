"""Arrivals, lengths, sampling mixes, recorded requests and conversations."""

from __future__ import annotations

import itertools
import json
import random
import statistics

import pytest

from benchmarks.traffic.arrivals import Bursts, Constant, Level, Poisson, Replay, closed_levels, open_levels
from benchmarks.traffic.conversations import Workload, conversations
from benchmarks.traffic.lengths import Fixed, LogNormal, LogUniform, parse_lengths
from benchmarks.traffic.recorded import RecordedRequest, read_requests
from benchmarks.traffic.sampling_mix import parse_mix


def first(schedule, count, seed=0):
    return list(itertools.islice(schedule.times_s(random.Random(seed)), count))


def taken(workload, count, salt="s", level=None):
    return list(itertools.islice(conversations(workload, level or Level("closed", users=1), salt), count))


def opening(conversation):
    return conversation.turns[0].messages[0]["content"]


# --- arrivals ---------------------------------------------------------------------------------------------------------


def test_constant_is_even():
    assert first(Constant(4.0), 4) == [0.0, 0.25, 0.5, 0.75]


def test_poisson_gaps_have_the_mean_and_spread_of_an_exponential():
    times = first(Poisson(5.0), 20_000)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times == sorted(times)
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)


def test_poisson_is_its_seed():
    assert first(Poisson(5.0), 10, seed=1) == first(Poisson(5.0), 10, seed=1) != first(Poisson(5.0), 10, seed=2)


def test_bursts_come_together():
    assert first(Bursts(3, 10.0), 7) == [0.0, 0.0, 0.0, 10.0, 10.0, 10.0, 20.0]


def test_replay_is_as_recorded_and_ends():
    assert first(Replay((0.0, 1.0, 5.0), speed=2.0), 9) == [0.0, 0.5, 2.5]


def test_levels():
    assert [level.users for level in closed_levels("1,8")] == [1, 8]
    assert [level.schedule for level in open_levels("poisson:2,4.5")] == [Poisson(2.0), Poisson(4.5)]
    assert open_levels("constant:8")[0].schedule == Constant(8.0)
    assert open_levels("bursts:16/10")[0].schedule == Bursts(16, 10.0)
    assert open_levels("bursts:16/10")[0].offered == 1.6
    assert open_levels("replay:2", [0.0, 3.0])[0].schedule == Replay((0.0, 3.0), 2.0)


@pytest.mark.parametrize("text", ["poisson", "poisson:0", "poisson:-1", "poisson:inf", "poisson:nan", "bursts:4",
                                  "bursts:0/1", "waves:3", "replay", "constant:x"])  # fmt: skip
def test_wrong_arrivals(text):
    with pytest.raises(ValueError, match=r"\w"):
        open_levels(text)


@pytest.mark.parametrize("text", ["0", "-1", "x", ""])
def test_wrong_users(text):
    with pytest.raises(ValueError, match=r"\w"):
        closed_levels(text)


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_lengths_are_read():
    assert parse_lengths("128") == Fixed(128)
    assert parse_lengths("loguniform:64-1024") == LogUniform(64, 1024)
    assert parse_lengths("lognormal:200,0.5,4096") == LogNormal(200, 0.5, 4096)
    assert parse_lengths("lognormal:200,0").longest == 200


@pytest.mark.parametrize(
    "text", ["0", "x", "loguniform:8", "loguniform:9-8", "lognormal:5", "lognormal:5,-1", "normal:5,1"]
)
def test_wrong_lengths(text):
    with pytest.raises(ValueError, match=r"\w"):
        parse_lengths(text)


def test_lognormal_has_its_median_and_stays_within():
    rng = random.Random(0)
    drawn = [LogNormal(100, 1.0, 500).draw(rng) for _ in range(5000)]
    assert statistics.median(drawn) == pytest.approx(100, rel=0.1)
    assert 1 <= min(drawn) <= max(drawn) == 500


def test_loguniform_takes_every_doubling_alike():
    rng = random.Random(0)
    drawn = [LogUniform(64, 1024).draw(rng) for _ in range(5000)]
    assert 64 <= min(drawn) <= max(drawn) <= 1024
    assert sum(value < 256 for value in drawn) / 5000 == pytest.approx(0.5, abs=0.03)


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_mix_has_its_weights():
    mix = parse_mix("greedy:1,mixed:3")
    rng = random.Random(0)
    drawn = [mix.draw(number, rng) for number in range(2000)]
    greedy = [fields for fields in drawn if fields == {"temperature": 0.0}]
    assert len(greedy) / 2000 == pytest.approx(0.25, abs=0.04)
    assert all({"temperature", "top_p", "seed"} <= set(fields) for fields in drawn if fields not in greedy)


def test_mix_of_given_fields():
    assert parse_mix('{"temperature": 0.3, "top_k": 5}').draw(0, random.Random(0)) == {"temperature": 0.3, "top_k": 5}


@pytest.mark.parametrize("text", ["hot", "greedy:0", "greedy:-1,mixed", "{", "[1]", '{"a":'])
def test_wrong_mix(text):
    with pytest.raises(ValueError, match=r"\w"):
        parse_mix(text)


# --- recorded ---------------------------------------------------------------------------------------------------------


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_recorded_requests_in_both_forms(tmp_path):
    path = write(
        tmp_path / "r.jsonl",
        {"timestamp": 3000, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]},
        "",
        {"at_s": 2.0, "prompt": "hi", "max_tokens": 4, "unknown": 1},
    )
    assert read_requests(path) == [
        RecordedRequest(0.0, ({"role": "user", "content": "hi"},), None, 4),
        RecordedRequest(1.0, (), 700, 9, (1, 2)),
    ]


@pytest.mark.parametrize(("text", "named"), [("", "no request"), ("{}", "line 1"), ('{"prompt": "a"}\n[', "line 2"),
                                              ('{"prompt": 3}', "line 1")])  # fmt: skip
def test_wrong_recordings_name_the_line(text, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        read_requests(write(tmp_path / "r.jsonl", text))


def test_blocks_share_text_as_recorded():
    recorded = (RecordedRequest(0.0, (), 600, 1, (7, 8)), RecordedRequest(1.0, (), 700, 1, (7, 9)))
    first_text, second_text = (opening(one) for one in taken(Workload(recorded=recorded), 2))
    assert not opening(taken(Workload(recorded=recorded), 1, salt="next")[0]).startswith(first_text[:8])
    shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first_text, second_text, strict=False))))
    assert len(first_text[:shared].split()) >= 512
    assert first_text != second_text
    assert len(second_text.split()) - len(first_text.split()) == 100


# --- conversations ----------------------------------------------------------------------------------------------------


def test_conversations_are_their_seed_and_salt():
    workload = Workload(prompt=LogUniform(4, 64), output=LogUniform(1, 9), sampling=parse_mix("mixed"), leave_rate=0.5)
    assert taken(workload, 20) == taken(workload, 20)
    assert taken(workload, 20) != taken(workload, 20, salt="t")


def test_unshared_texts_part_at_once():
    """Else a prefix cache would find what the load did not mean to share."""
    texts = [opening(one) for one in taken(Workload(prompt=Fixed(50)), 50)]
    assert len({text[:9] for text in texts}) == 50


def test_prefix_groups_share_and_nothing_else():
    workload = Workload(prompt=Fixed(5), prefix_tokens=40, prefix_groups=3)
    openings = [opening(one) for one in taken(workload, 12)]
    assert len(set(openings)) == 3
    assert openings[0] == openings[3]
    assert all(len(text.split()) == 41 for text in openings)
    assert taken(workload, 1)[0].turns[0].messages[0]["role"] == "system"


def test_tokens_per_word_scales_the_text():
    assert len(opening(taken(Workload(prompt=Fixed(100), tokens_per_word=2.0), 1)[0]).split()) == 51


def test_recorded_prompts_are_asked_in_turn():
    recorded = tuple(RecordedRequest(None, ({"role": "user", "content": text},), None, 7) for text in "abc")
    asked = [turn for one in taken(Workload(recorded=recorded, turns=2), 2) for turn in one.turns]
    assert [turn.messages[0]["content"] for turn in asked] == ["a", "b", "c", "a"]
    assert {turn.max_tokens for turn in asked} == {7}


def test_leave_rate():
    turns = [one.turns[0] for one in taken(Workload(output=Fixed(10), leave_rate=0.3), 2000)]
    leaving = [turn.leave_after for turn in turns if turn.leave_after is not None]
    assert len(leaving) / 2000 == pytest.approx(0.3, abs=0.04)
    assert set(leaving) == set(range(1, 11))


def test_open_loop_conversations_carry_their_times():
    assert [one.at_s for one in taken(Workload(), 3, level=Level("c", schedule=Constant(2.0)))] == [0.0, 0.5, 1.0]
