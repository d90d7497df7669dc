"""`mlx-troupe service`: what systemd and launchd get to read, and what is done to files."""

import plistlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_troupe.api.cli import main
from mlx_troupe.api.commands import service
from mlx_troupe.api.flags import as_arguments
from mlx_troupe.api.layers import load_settings
from mlx_troupe.api.options import SettingsError, all_options
from mlx_troupe.api.services import MARK, launchd_plist, service_plan, systemd_quoted, systemd_unit

ODD = ["/opt/a b/python", "--x=1 2", 'say "hi"', "50%", "$HOME", "back\\slash", "it's", "", "ünïcode", "#;", "%n$$"]


def plan(platform, command=("/bin/x",), name="mlx-troupe"):
    home = Path("/home/a b")
    return service_plan(platform, name, command, home=home, config_home=home / ".config", user_id=501, stop_s=45)


def systemd_words(line):
    """Words of a command line as systemd.syntax(7) and systemd.service(5) read them, written apart from the product."""
    words, word, quoted, place = [], None, False, 0
    while place < len(line):
        letter = line[place]
        place += 1
        if letter == "\\":
            letter = line[place]
            assert letter in '\\"'
            place += 1
            word = (word or "") + letter
        elif letter == '"':
            quoted = not quoted
            word = word or ""
        elif letter in "%$":
            assert line[place] == letter, "a specifier or a variable"
            place += 1
            word = (word or "") + letter
        elif letter == " " and not quoted:
            words, word = [*words, *([] if word is None else [word])], None
        else:
            word = (word or "") + letter
    assert not quoted
    return [*words, *([] if word is None else [word])]


def exec_start(unit):
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    return line.removeprefix("ExecStart=")


def test_systemd_gets_every_argument_whole():
    assert systemd_words(exec_start(systemd_unit(ODD, 45))) == ODD


@given(st.lists(st.text().filter(str.isprintable), min_size=1))
def test_any_printable_arguments_survive_quoting(arguments):
    assert systemd_words(" ".join(map(systemd_quoted, arguments))) == arguments


@pytest.mark.parametrize("platform", ["linux", "darwin"])
@pytest.mark.parametrize("bad", ["a\nExecStartPre=/bin/evil", "a\0b", "a\x1bb", "a\u2028b"])
def test_arguments_cannot_add_lines(platform, bad):
    with pytest.raises(SettingsError):
        plan(platform, ("/bin/x", bad))


def test_launchd_gets_every_argument_whole():
    found = plistlib.loads(launchd_plist("org.x", ODD, Path("/l"), 45))
    assert found["ProgramArguments"] == ODD
    assert found["Label"] == "org.x"
    assert found["RunAtLoad"] is True
    assert found["KeepAlive"] == {"SuccessfulExit": False}
    assert found["ExitTimeOut"] == 45
    assert MARK in found["Comment"]


def test_places_and_commands():
    linux = plan("linux")
    assert linux.path == Path("/home/a b/.config/systemd/user/mlx-troupe.service")
    assert linux.start[-1] == ("systemctl", "--user", "restart", "mlx-troupe.service")
    mac = plan("darwin")
    assert mac.path == Path("/home/a b/Library/LaunchAgents/org.mlx-troupe.plist")
    assert mac.start == (("launchctl", "bootstrap", "gui/501", str(mac.path)),)
    with pytest.raises(SettingsError, match="win32"):
        plan("win32")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine")
def test_systemd_itself_accepts_the_unit(tmp_path):
    program = tmp_path / "a b%c"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "mlx-troupe.service"
    unit.write_text(systemd_unit([str(program), *ODD[1:]], 45))
    found = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_flags_give_the_same_settings(tmp_path):
    texts = {"host": "::1", "cors_origins": "https://a.example,b", "length_classes": "256,1024", "default_top_p": "0.5"}
    texts |= {"page": "off", "insecure": "yes", "memory_limit_bytes": "2GiB", "served_name": "a b", "model": "demo"}
    environment = {all_options()[name].variable: text for name, text in texts.items()}
    settings = load_settings({}, environment)
    arguments = as_arguments(settings, {})
    assert main(["serve", *arguments, "--print-config"], environment={}) == 0
    flags = {name: (texts[name]) for name in texts}
    again = load_settings(flags, {})
    assert (again.server, again.runtime) == (settings.server, settings.runtime)
    assert len(arguments) == len(texts)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A home of its own, and a service manager that only notes what it is told."""
    told = []

    def run(command, check):
        told.append(tuple(command))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(service.subprocess, "run", run)
    monkeypatch.setattr(service.sys, "platform", "linux")

    def call(*arguments, **environment):
        return main(["service", *arguments], environment={"HOME": str(tmp_path), **environment})

    call.told = told
    call.path = tmp_path / ".config/systemd/user/mlx-troupe.service"
    return call


def test_install_status_remove(machine, capsys):
    assert machine("status") == 1
    assert machine("install", "demo", "--port", "9000", "--no-page") == 0
    words = systemd_words(exec_start(machine.path.read_text()))
    assert words == [sys.executable, "-m", "mlx_troupe.api.cli", "serve", "--port=9000", "--no-page", "--model=demo"]
    assert machine.path.stat().st_mode & 0o777 == 0o600
    assert machine.told[-1] == ("systemctl", "--user", "restart", "mlx-troupe.service")
    assert machine("install", "demo", "--port", "9001") == 0
    assert "--port=9001" in machine.path.read_text()
    assert machine("status") == 0
    assert machine("remove") == 0
    assert not machine.path.exists()
    assert machine.told[-2:] == [
        ("systemctl", "--user", "disable", "--now", "mlx-troupe.service"),
        ("systemctl", "--user", "daemon-reload"),
    ]
    assert machine("remove") == 1
    assert "not installed" in capsys.readouterr().err


def test_dry_runs_touch_nothing(machine, capsys):
    assert machine("install", "demo", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "ExecStart=" in shown
    assert "$ " + shlex.join(("systemctl", "--user", "enable", "mlx-troupe.service")) in shown
    assert not machine.path.exists()
    assert machine("install", "demo") == 0
    before = len(machine.told)
    assert machine("remove", "--dry-run") == 0
    assert machine.path.exists()
    assert len(machine.told) == before


def test_what_would_not_start_is_not_installed(machine, tmp_path, capsys):
    assert machine("install") == 2
    assert machine("install", "demo", MLX_TROUPE_API_KEYS="a:long-enough-key") == 2
    assert machine("install", "demo", "--host", "0.0.0.0") == 2
    assert machine("install", "demo", "--port", "x") == 2
    assert machine("install", "demo", "--name", "../evil") == 2
    assert not machine.path.exists()
    assert "long-enough-key" not in capsys.readouterr().err
    keys = tmp_path / "keys"
    keys.write_text("a:long-enough-key\n")
    assert machine("install", "demo", "--host", "0.0.0.0", "--api-key-file", str(keys)) == 0
    assert "long-enough-key" not in machine.path.read_text()


def test_relative_paths_become_absolute(machine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "keys").write_text("a:long-enough-key\n")
    assert machine("install", "model", "--api-key-file", "keys") == 0
    text = machine.path.read_text()
    assert f"--model={tmp_path}/model" in text
    assert f"--api-key-file={tmp_path}/keys" in text


def test_somebody_elses_file_is_left_alone(machine, capsys):
    machine.path.parent.mkdir(parents=True)
    machine.path.write_text("[Unit]\n")
    for verb in (("install", "demo"), ("remove",), ("status",)):
        assert machine(*verb) == 2
    assert machine.path.read_text() == "[Unit]\n"
    assert machine.told == []
    assert "left alone" in capsys.readouterr().err
