"""`mlx-troupe models` and `doctor`, over fake facts."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_troupe.api.cli import main
from mlx_troupe.api.terminal import ProgressBar, size
from mlx_troupe.runtime.errors import TroupeError


def cached(name: str, **facts):
    return SimpleNamespace(
        **(
            {
                "name": name,
                "kind": "hub",
                "path": Path("/cache") / name,
                "size_bytes": 1_500_000_000,
                "revision": "0123456789abcdef",
                "architecture": "llama",
                "quantisation": "4 bits",
                "problem": "",
                "origin": "",
            }
            | facts
        )
    )


class FakeCatalog:
    def __init__(self, *models) -> None:
        self.models = list(models)

    def list_models(self):
        return self.models

    def model_info(self, name):
        found = [model for model in self.models if model.name == name]
        if not found:
            raise TroupeError(f"{name} is not on this disk")
        return found

    def remove_model(self, name):
        return sum(model.size_bytes for model in self.model_info(name))

    def pull(self, name, revision, *, progress):
        progress(SimpleNamespace(stage="download", done=1, total=2, unit="bytes"))
        return SimpleNamespace(path=Path("/cache") / name, served_name=name, revision=revision or "abc")


@pytest.fixture
def catalog(monkeypatch) -> FakeCatalog:
    found = FakeCatalog(cached("owner/one"), cached("owner/two", problem="unsupported", quantisation="", revision=""))
    monkeypatch.setattr("mlx_troupe.api.commands.models.catalog", lambda: found)
    return found


def test_list(catalog, capsys):
    assert main(["models", "list"], environment={}) == 0
    head, one, two = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "SIZE", "ARCHITECTURE", "QUANTISATION", "REVISION"]
    assert one.split() == ["owner/one", "1.5", "GB", "llama", "4", "bits", "01234567"]
    assert "unusable" in two


def test_list_as_json(catalog, capsys):
    assert main(["models", "list", "--json"], environment={}) == 0
    assert [model["name"] for model in json.loads(capsys.readouterr().out)] == ["owner/one", "owner/two"]


def test_an_empty_list(catalog, capsys):
    catalog.models.clear()
    assert main(["models", "list"], environment={}) == 0
    found = capsys.readouterr()
    assert found.out == ""
    assert "models pull" in found.err


def test_info(catalog, capsys):
    assert main(["models", "info", "owner/two"], environment={}) == 0
    assert "unsupported" in capsys.readouterr().out
    assert main(["models", "info", "owner/two", "--json"], environment={}) == 0
    assert json.loads(capsys.readouterr().out)[0]["path"] == "/cache/owner/two"
    assert main(["models", "info", "nope"], environment={}) == 1
    assert "not on this disk" in capsys.readouterr().err


def test_remove(catalog, capsys):
    assert main(["models", "remove", "owner/one"], environment={}) == 0
    assert capsys.readouterr().out == "removed owner/one: 1.5 GB\n"
    assert main(["models", "remove", "nope"], environment={}) == 1


def test_pull(catalog, capsys):
    assert main(["models", "pull", "a/b", "--revision", "v1"], environment={}) == 0
    found = capsys.readouterr()
    assert found.out == "a/b@v1: /cache/a/b\n"
    assert found.err == ""  # nobody watches, so no bar


def test_doctor(monkeypatch, capsys):
    facts = {
        "device": {"backend": "cpu", "memory_bytes": 3 * 10**9, "launching_ahead_copies": True, "name": ""},
        "advice": {},
    }
    monkeypatch.setattr("mlx_troupe.api.commands.doctor.diagnostics", lambda: facts)
    assert main(["doctor"], environment={}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "device"
    assert lines[1].split() == ["backend", "cpu"]
    assert lines[2].split() == ["memory", "bytes", "3.0", "GB"]
    assert lines[3].split() == ["launching", "ahead", "copies", "yes"]
    assert lines[-1].split() == ["none"]
    assert main(["doctor", "--json"], environment={}) == 0
    assert json.loads(capsys.readouterr().out) == facts


def test_doctor_without_mlx(monkeypatch, capsys):
    def broken():
        raise ImportError("libmlx.so: no such file")

    monkeypatch.setattr("mlx_troupe.api.commands.doctor.diagnostics", broken)
    assert main(["doctor"], environment={}) == 1
    found = capsys.readouterr()
    assert "libmlx.so" in found.err
    assert "python" in found.out


class Screen:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_progress_bar():
    screen, now = Screen(), [0.0]
    bar = ProgressBar(screen, lambda: now[0])

    def report(stage, done, total, unit="bytes"):
        bar(SimpleNamespace(stage=stage, done=done, total=total, unit=unit))

    report("download", 0, 1000)
    report("download", 10, 1000)  # too soon to draw
    now[0] = 1.0
    report("download", 500, 1000)
    report("download", 1000, 1000)  # the end is always drawn
    report("convert", 3, None, "tensors")
    bar.close()
    bar.close()
    lines = screen.text.replace("\x1b[2K", "").replace("\n", "\r").split("\r")
    assert [line for line in lines if line] == [
        f"download: [{'.' * 24}]   0% of 1.0 kB",
        f"download: [{'#' * 12}{'.' * 12}]  50% of 1.0 kB",
        f"download: [{'#' * 24}] 100% of 1.0 kB",
        "convert: 3",
    ]
    assert screen.text.endswith("\n")


def test_size():
    assert [size(count) for count in (0, 999, 1500, 2 * 10**12)] == ["0 B", "999 B", "1.5 kB", "2.0 TB"]
