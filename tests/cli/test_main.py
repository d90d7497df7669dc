"""The command line as a whole: usage, exit codes, where things are written."""

import subprocess
import sys
from pathlib import Path

import pytest

from mlx_troupe.api.cli import main
from mlx_troupe.runtime.errors import TroupeError

from .fake_cli import loaded, run

ROOT = Path(__file__).parents[2]


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("mlx-troupe ")


@pytest.mark.parametrize("arguments", [[], ["fly"], ["serve", "--wings"], ["models"], ["generate", "a", "b"]])
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "models", "doctor"])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert command in capsys.readouterr().out


def test_bad_settings(capsys):
    assert main(["serve", "--port", "x"], environment={}) == 2
    assert "--port" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_print_config(command, capsys):
    assert main([command, "demo", "--max_rows", "3", "--print-config"], environment={}) == 0
    found = capsys.readouterr()
    assert 'model = "demo"  # flag --model' in found.out
    assert "max_rows = 3  # flag --max-rows" in found.out
    assert found.err == ""


def test_failures(capsys):
    service = loaded()
    service.load_error = TroupeError("no such model; try demo")
    assert run(service, "generate", "nope", "--prompt", "hi") == 1
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err == "mlx-troupe: no such model; try demo\n"


def test_commands_do_not_import_mlx():
    code = "import sys, mlx_troupe.api.cli; sys.exit(any(m in sys.modules for m in ('mlx', 'mlx_lm', 'aiohttp')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_reader_of_stdout_may_leave():
    command = f"{sys.executable} -m tests.cli.fake_cli generate -p hi --seed 1 | true"
    found = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30)
    assert "Traceback" not in found.stderr
