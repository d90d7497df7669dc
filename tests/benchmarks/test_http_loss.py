"""What HTTP costs: losses of rounds, and the whole program on a random model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.http_loss import HERE, NAMES, losses, table
from benchmarks.random_model import write
from mlx_troupe.runtime import Generation, Runtime, SamplingParams

ROOT = Path(__file__).parents[2]


class Figures:
    def __init__(self, tokens_per_s: float) -> None:
        self.tokens_per_s = tokens_per_s
        self.ttft_ms = self.gap_ms = {"p50": 5.0, "p99": None}


class Measured:
    def __init__(self, repeat: int, target: str, tokens_per_s: float) -> None:
        self.repeat, self.target, self.figures = repeat, target, Figures(tokens_per_s)


def test_a_loss_is_of_one_round() -> None:
    apart = NAMES["on"]
    found = [
        *(Measured(0, HERE, 1000.0), Measured(0, apart, 900.0)),
        *(Measured(1, apart, 400.0), Measured(1, HERE, 500.0)),
        *(Measured(2, HERE, 100.0), Measured(2, apart, 95.0)),
    ]
    assert losses(found, apart) == pytest.approx([0.1, 0.2, 0.05])
    row = next(line for line in table(found).splitlines() if apart in line)
    assert row == "| HTTP, API process | 400 | 5.0 | 5.0 |  | 10.0% (5.0% to 20.0%) |"
    assert "%" not in next(line for line in table(found).splitlines() if HERE in line)


async def test_a_random_model_is_served_and_all_its_output_is_text(tmp_path) -> None:
    folder = write(tmp_path / "tiny", "tiny", 2000, "float32")
    async with Runtime(model=str(folder)) as runtime:
        answer = await runtime.complete(
            Generation(prompt="some words", max_tokens=50, sampling=SamplingParams(seed=1), ignore_eos=True)
        )
    assert answer.usage.completion_tokens == 50
    assert len(answer.text) >= 50


@pytest.mark.heavy
def test_the_program(tmp_path) -> None:
    path = tmp_path / "rounds.json"
    command = [sys.executable, "-m", "benchmarks.http_loss", "--shape", "tiny", "--vocab", "1000", "--streams", "4"]
    done = subprocess.run(
        [*command, "--tokens", "16", "--rounds", "1", "--json", str(path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert {row["target"] for row in json.loads(path.read_text())} == {HERE, *NAMES.values()}
    assert all(row["tokens_per_s"] > 0 for row in json.loads(path.read_text()))
