"""`mlx-troupe generate`."""

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_troupe.runtime.errors import InvalidRequest
from mlx_troupe.runtime.events import Failed, TextDelta

from .fake_cli import loaded, run

ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_prompt_flag(capsys):
    service = loaded()
    assert run(service, "generate", "demo", "-p", "hi", "--system", "be brief", "--seed", "3", "--top-k", "5") == 0
    found = capsys.readouterr()
    assert found.out == "Hello, wörld!\n"
    assert found.err == ""
    (generation,) = service.submitted
    assert generation.messages == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"})
    assert generation.sampling.seed == 3
    assert generation.sampling.top_k == 5
    assert service.exited


@pytest.mark.parametrize("arguments", [(), ("--prompt", "-")])
def test_prompt_on_stdin(capsys, monkeypatch, arguments):
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin\n"))
    service = loaded()
    assert run(service, "generate", *arguments, "--raw", "--max-tokens", "2", "--stop", "x", "--stop", "y") == 0
    assert capsys.readouterr().out == "Hello,\n"
    assert service.submitted[0].prompt == "from stdin\n"
    assert service.submitted[0].stop == ("x", "y")


def test_no_prompt_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", Terminal())
    assert run(loaded(), "generate") == 2
    assert "--prompt" in capsys.readouterr().err


def test_json(capsys):
    assert run(loaded(), "generate", "-p", "hi", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == "Hello, wörld!"
    assert found["finish_reason"] == "stop"
    assert found["model"] == "fake/model"
    assert found["usage"]["completion_tokens"] == 4


def test_refused(capsys):
    service = loaded()
    service.refusals.append(InvalidRequest("temperature must be in [0, 100], got -1", param="temperature"))
    assert run(service, "generate", "-p", "hi", "--temperature", "-1") == 1
    assert "temperature" in capsys.readouterr().err


def test_failed_midway(capsys):
    service = loaded(lambda _: [TextDelta("Hel", (1,)), Failed("engine_failed", "nan in layer 3")])
    assert run(service, "generate", "-p", "hi") == 1
    found = capsys.readouterr()
    assert found.out == "Hel"
    assert "nan in layer 3" in found.err


def test_interrupt():
    command = [sys.executable, "-m", "tests.cli.fake_cli", "generate", "-p", "slow"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == b"Once"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in errors
