"""The Dockerfile, read rather than built: what can be said of it without a container engine."""

import fnmatch
import json
import re
import shlex
from pathlib import Path

import pytest

from mlx_troupe.api.cli import main

ROOT = Path(__file__).parents[2]
KNOWN = [
    "FROM",
    "WORKDIR",
    "COPY",
    "RUN",
    "ENV",
    "EXPOSE",
    "VOLUME",
    "HEALTHCHECK",
    "STOPSIGNAL",
    "ENTRYPOINT",
    "CMD",
    "USER",
]


def parsed():
    """Stages in order: their name, what they come from, and their instructions."""
    text = (ROOT / "docs/docker/Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    stages = []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        word, _, rest = line.partition(" ")
        assert word in KNOWN, line
        if word == "FROM":
            source, name = re.fullmatch(r"(\S+) AS (\w+)", rest).groups()
            stages.append((name, source, []))
        else:
            stages[-1][2].append((word, rest))
    return stages


STAGES = {name: (source, instructions) for name, source, instructions in parsed()}


def inherited(name):
    """All instructions an image is made of."""
    source, instructions = STAGES[name]
    return [*(inherited(source) if source in STAGES else []), *instructions]


def last(name, word):
    return [rest for found, rest in inherited(name) if found == word][-1]


@pytest.mark.parametrize("image", ["cpu", "cuda"])
def test_an_image_runs_as_nobody_special_and_says_how_it_is(image):
    assert last(image, "USER") == "10001"
    assert inherited(image)[-1][0] == "USER", "what follows would run as that user, what precedes as root"
    assert json.loads(last(image, "ENTRYPOINT")) == ["mlx-troupe"]
    check = last(image, "HEALTHCHECK")
    compile(json.loads(check.partition("CMD ")[2])[2], "healthcheck", "exec")
    assert "/livez" in check
    assert last(image, "STOPSIGNAL") == "SIGTERM"


def test_sources_are_pinned_to_a_version_and_nothing_is_fetched_around_pip_and_apt():
    for source, instructions in STAGES.values():
        assert source in STAGES or re.fullmatch(r"python:3\.\d+-slim", source)
        for word, rest in instructions:
            assert not re.search(r"curl|wget|https?://(?!127\.0\.0\.1)|--trusted-host|sudo|chmod 777", rest), rest
            assert not (word == "ENV" and re.search(r"KEY|TOKEN|SECRET|PASSWORD", rest)), rest


def test_what_is_copied_is_there_and_not_ignored():
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for _, instructions in STAGES.values():
        for word, rest in instructions:
            if word == "COPY" and "--from" not in rest:
                for source in rest.split()[:-1]:
                    assert (ROOT / source).exists()
                    assert any(fnmatch.fnmatch(source, pattern) for pattern in kept), source
    assert (ROOT / ".dockerignore").read_text().startswith("*\n"), "what is not named must not reach the image"


def test_every_package_of_the_project_is_copied():
    copied = {rest.split()[0] for word, rest in STAGES["build"][1] if word == "COPY"}
    folders = re.search(r"FOLDERS = \((.*?)\)", (ROOT / "setup.py").read_text()).group(1)
    assert {name.strip(' "') for name in folders.split(",")} <= copied


def test_its_command_is_one_the_command_line_takes(capsys):
    command = json.loads(last("cpu", "CMD"))
    assert command == shlex.split(shlex.join(command))
    assert main([*command, "--print-config"], environment={}) == 0
    shown = capsys.readouterr().out
    assert 'host = "0.0.0.0"' in shown
    assert "insecure = false" in shown
