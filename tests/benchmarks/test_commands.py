"""`mlx-troupe bench` as a user types it: over the fake service, its servers started as processes, and wrong options."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks.contenders import KNOWN, Contender, parse_contender
from mlx_troupe.api import cli
from mlx_troupe.api.options import all_options
from tests.cli.fake_cli import loaded, run

ROOT = Path(__file__).parents[2]
FAKE = f"{shlex.quote(sys.executable)} -m tests.api.run_fake_server ready --port {{port}}"
QUICK = ("--requests", "4", "--repeats", "2", "--warm-up", "1", "--scrape-interval", "0.05")


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    """Servers of the tests are modules of the tests."""
    monkeypatch.chdir(ROOT)


def test_run_in_process_writes_everything(tmp_path, capsys):
    lines, html = tmp_path / "run.jsonl", tmp_path / "run.html"
    assert run(loaded(), "bench", "run", "--users", "1,2", *QUICK, "--json", str(lines), "--html", str(html)) == 0
    found = capsys.readouterr()
    assert "2 users" in found.out
    assert "counted by usage" in found.out
    kinds = [json.loads(line)["kind"] for line in lines.read_text().splitlines()]
    assert kinds == ["run", *["measurement"] * 4]
    assert html.read_text().count("<svg") >= 12
    assert run(loaded(), "bench", "report", str(lines), "--html", str(tmp_path / "again.html")) == 0
    assert capsys.readouterr().out == found.out
    assert (tmp_path / "again.html").read_text() == html.read_text()


def test_compare_starts_measures_and_stops_servers(tmp_path, capsys):
    arguments = ("--server", f"one={FAKE}", "--server", f"two={FAKE}", "--users", "2", *QUICK, "--logs", str(tmp_path))
    assert run(loaded(), "bench", "compare", *arguments) == 0
    out = capsys.readouterr().out
    assert "one / two" in out
    assert "one: 8 requests" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.log", "two.log"]


def test_a_server_that_ends_at_once_shows_its_log(capsys):
    command = f"{shlex.quote(sys.executable)} -c 'raise SystemExit(\"no such model\")' {{port}}"
    assert run(loaded(), "bench", "compare", "--server", f"bad={command}", *QUICK) == 1
    assert "bad is not healthy: bad exited with 1\nno such model" in capsys.readouterr().err


def test_a_program_that_is_not_there(capsys):
    assert run(loaded(), "bench", "compare", "--server", "bad=/no/such/program {port}", *QUICK) == 1
    assert "/no/such/program" in capsys.readouterr().err


def test_nobody_at_the_url(capsys):
    assert run(loaded(), "bench", "run", "--url", "http://127.0.0.1:9", *QUICK) == 1
    assert "no healthy server at http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run", "--users", "0"], "--users"),
        (["run", "--url", "http://127.0.0.1:9", "--users", "9000000"], "ulimit"),
        (["run", "--users", "1", "--arrivals", "poisson:1"], "--arrivals"),
        (["run", "--arrivals", "waves:1"], "--arrivals"),
        (["run", "--arrivals", "replay"], "--requests-file"),
        (["run", "--prompt-lengths", "long"], "--prompt-lengths"),
        (["run", "--output-lengths", "0"], "--output-lengths"),
        (["run", "--sampling", "hot"], "--sampling"),
        (["run", "--leave-rate", "2"], "--leave-rate"),
        (["run", "--repeats", "0"], "--repeats"),
        (["run", "--requests", "0"], "--requests"),
        (["run", "--duration", "0"], "--duration"),
        (["run", "--think", "-1"], "--think"),
        (["run", "--scrape-interval", "-1"], "--scrape-interval"),
        (["run", "--request-timeout", "0"], "--request-timeout"),
        (["run", "--tokens-per-word", "0"], "--tokens-per-word"),
        (["run", "--objective", "speed=1"], "--objective"),
        (["run", "--requests-file", "/no/such"], "--requests-file"),
        (["run", "--key-file", "/no/such"], "--key-file"),
        (["run", "--json", "/no/such/folder/x"], "folder does not exist"),
        (["run", "--url", "ftp://x"], "--url"),
        (["compare", "--server", "nobody"], "nobody"),
        (["compare", "--server", "a=some command"], "{port}"),
        (["compare", "--server", "a=x {model} {port}"], "model"),
        (["compare", "--server", "a=http://x", "--server", "a=http://y"], "same name"),
        (["report", "/no/such"], "/no/such"),
    ],
)
def test_wrong_options_are_named(arguments, named, capsys):
    assert run(loaded(), "bench", *arguments) in (1, 2)
    found = capsys.readouterr()
    assert named in found.err
    assert "Traceback" not in found.err
    assert found.out == ""


@pytest.mark.parametrize("verb", ["run", "compare", "report", "micro", "trace"])
def test_help(verb, capsys):
    with pytest.raises(SystemExit) as caught:
        run(loaded(), "bench", verb, "--help")
    assert caught.value.code == 0
    assert "usage: mlx-troupe bench" in capsys.readouterr().out


def test_flags_of_the_bench_are_not_settings_of_the_server():
    """A flag with a setting's name would silently change the server."""
    parser = cli._parser()
    found = parser.parse_args(["bench", "compare", "--server", "mlx-troupe"])
    assert not set(vars(found)) & set(all_options())


def test_known_servers_are_found_in_the_peers_folder(tmp_path):
    program = tmp_path / "vllm" / "bin" / "vllm-mlx"
    program.parent.mkdir(parents=True)
    program.touch()
    found = parse_contender("vllm-mlx", tmp_path)
    assert found == Contender("vllm-mlx", command=KNOWN["vllm-mlx"].replace("vllm-mlx", str(program), 1))
    with pytest.raises(ValueError, match="not on PATH"):
        parse_contender("rapid-mlx", tmp_path)


def test_a_url_is_taken_as_it_is():
    assert parse_contender("a=https://host/v1") == Contender("a", url="https://host/v1")
