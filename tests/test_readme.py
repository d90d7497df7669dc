"""The README's examples run as they stand, on a tiny model."""

from __future__ import annotations

import re
from pathlib import Path

from tests.models.tiny import build_tiny

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_embedding_example_runs(tmp_path, capsys) -> None:
    section = README.split("## Embed it")[1]
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 15
    folder = build_tiny("llama", tmp_path)
    assert 'model="demo"' in code
    exec(compile(code.replace('model="demo"', f"model={str(folder)!r}"), "README", "exec"), {"__name__": "example"})
    assert len(capsys.readouterr().out) > 20


def test_two_commands_set_everything_up() -> None:
    commands = re.findall(r"```sh\n(python3 -m venv.*?)\n```", README)
    assert len(commands) == 2
    assert commands[0].endswith("mlx-troupe serve demo")
    assert commands[1].endswith("pytest")
