"""Micro-benchmarks: every part runs on a tiny model, does the work it claims, and stands beside a floor."""

from __future__ import annotations

import json

import pytest

from benchmarks.micro import host, steps
from benchmarks.micro.case import Case, best_s, extra_s, least_s
from benchmarks.micro.machine import MachineRates
from benchmarks.micro.run import parts_of, table
from tests.cli.fake_cli import loaded, run

RATES = MachineRates(100e9, 1e12, "float32", 10e9, 50e-9, 2e-6)
SMALL = ("--rows", "1,2", "--contexts", "32", "--vocab", "512", "--repeats", "1")


def test_the_floor_is_the_larger_of_both():
    assert RATES.floor_s(100e9, 1.0)[0] == 1.0
    assert "GB/s" in RATES.floor_s(100e9, 1.0)[1]
    assert RATES.floor_s(1.0, 2e12)[0] == 2.0
    assert "GFLOP/s" in RATES.floor_s(1.0, 2e12)[1]


def test_timing_takes_the_best(monkeypatch):
    """Work of 1, 2, 3 ... seconds: the first call never counts."""
    now, calls = [0.0], [0]

    def work():
        calls[0] += 1
        now[0] += calls[0]

    monkeypatch.setattr("benchmarks.micro.case.time.perf_counter", lambda: now[0])
    assert least_s(work, 3) == 2
    calls[0] = 0
    assert best_s(work, repeats=3, rounds=2) == 3  # of 2, 3, 4
    assert extra_s(lambda: now.__setitem__(0, now[0] + 1), lambda: now.__setitem__(0, now[0] + 4), 2) == 3
    assert extra_s(lambda: now.__setitem__(0, now[0] + 9), lambda: now.__setitem__(0, now[0] + 4), 2) == 0


def test_every_part_in_one_table(tmp_path, capsys):
    path = tmp_path / "micro.json"
    assert run(loaded(), "bench", "micro", *SMALL, "--json", str(path)) == 0
    out = capsys.readouterr().out
    found = json.loads(path.read_text())
    parts = {case["part"] for case in found["cases"]}
    assert parts == {
        "step", "join and leave", "sampling", "mask, host", "mask, device", "tree match", "tree insert", "message hop",
        "detokenise", "SSE encode", "frame out", "frame in",
    }  # fmt: skip
    for case in found["cases"]:
        assert case["case"] in out
        assert case["skipped"] or case["floor_s"] > 0
        assert case["skipped"] or case["part"] in ("join and leave", "mask, device") or case["measured_s"] > 0
    named = [case["case"] for case in found["cases"] if case["part"] == "step"]
    for words in ("overlap off", "overlap build", "overlap launch", "row-by-row", "compiled"):
        assert any(words in name for name in named)


def test_steps_do_decode_their_rows():
    """The engine under the clock holds the rows and contexts the case names, and its tokens are computed."""
    import mlx.core as mx

    from benchmarks.decode_rows import build_model

    bench = steps.StepBench(build_model("tiny", 512, mx.float32), 512)
    for overlap in ("off", "build", "launch"):
        stepping = steps.Stepping(bench, steps.StepSettings(3, 40, overlap))
        before = stepping.engine._batch.length(0)
        stepping.steps()
        batch = stepping.engine._batch
        assert [row for row in batch.order if row is not None] == [0, 1, 2]
        assert batch.length(0) - before == steps.STEPS_A_TIMING
        assert stepping.engine._flight is None
    assert bench.token_bytes == 4 * 2 * 16 * 2 * 4  # layers, KV heads, head size, keys and values, float32
    floor_s, floor = bench.floor(RATES, 2, 100)
    assert floor_s == pytest.approx(
        max((bench.weight_bytes + 200 * bench.token_bytes) / 100e9, 2 * 2 * bench.parameters / 1e12)
    )
    assert floor


def test_joins_leave_the_batch_as_large_as_it_was():
    import mlx.core as mx

    from benchmarks.decode_rows import build_model

    bench = steps.StepBench(build_model("tiny", 512, mx.float32), 512)
    (case,) = steps.join_cases(bench, RATES, [2], [40], 2)
    assert case.floor_s == pytest.approx(2 * 40 * bench.token_bytes / 100e9)


def test_the_relay_hands_on_every_message():
    (case,) = host.hop_cases(RATES, 1)
    assert case.measured_s > 0
    assert case.times_floor == case.measured_s / 2e-6


def test_what_cannot_be_measured_says_why():
    text = table(
        RATES, [Case(part="step", case="compiled", skipped="no kernel"), Case(part="a", case="b", measured_s=1)]
    )
    assert "not measured: no kernel" in text
    assert Case(part="a", case="b", measured_s=1).times_floor is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--parts", "warp"], "warp"), (["--rows", "x"], "--rows"), (["--contexts", "0"], "--contexts"),
     (["--vocab", "5"], "--vocab"), (["--json", "/no/such/x"], "/no/such/x")],
)  # fmt: skip
def test_wrong_options_are_named(arguments, named, capsys):
    assert run(loaded(), "bench", "micro", *SMALL, *arguments) in (1, 2)
    assert named in capsys.readouterr().err


def test_parts():
    assert parts_of("sse,hop") == ("sse", "hop")
    assert len(parts_of(None)) == 9
