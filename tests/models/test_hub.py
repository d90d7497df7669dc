"""Hub models against a hub on localhost: what is fetched, in which order, and what each failure says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .fake_hub import COMMIT, FakeHub, running_hub
from .tiny import build_tiny

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "owner/tiny"
RUN = """
import json, sys
from mlx_troupe.runtime.models import catalog, hub
from mlx_troupe.runtime.models.errors import ModelError
from mlx_troupe.runtime.models.resolve import resolve
reports = []
try:
    result = {expression}
except ModelError as error:
    result = {{"error": type(error).__name__, "text": str(error)}}
assert "mlx.core" not in sys.modules
print(json.dumps({{"result": result, "reports": reports}}))
"""
RESOLVE = "(lambda s: [str(s.path), s.revision, s.served_name])(resolve({arguments}))"
DOWNLOAD = f"{NAME!r}, allow_download=True, progress=lambda p: reports.append([p.stage, p.done, p.total])"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def repository(tiny: Path, tmp_path: Path) -> Path:
    """A repository with more than is wanted: another copy of the weights, a pickle, a script."""
    folder = Path(shutil.copytree(tiny, tmp_path / "repository"))
    (folder / "onnx").mkdir()
    for name in ("onnx/model.onnx", "onnx/config.json", "pytorch_model.bin", "modeling.py", "README.md"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def hub(repository: Path) -> Iterator[FakeHub]:
    with running_hub(NAME, repository) as hub:
        yield hub


def run(hub: FakeHub, home: Path, arguments: str, expression: str = "", **variables: str) -> Any:
    """Resolve in a new process: Hugging Face's client reads its settings when it is imported."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"} | variables
    code = RUN.format(expression=expression or RESOLVE.format(arguments=arguments))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_model_is_fetched_without_what_is_not_wanted_then_found_offline(hub: FakeHub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    answer = run(hub, home, DOWNLOAD, HF_TOKEN="hf_secret")
    path, revision, served_name = answer["result"]
    assert (revision, served_name) == (COMMIT, NAME)
    assert Path(path).is_relative_to(home)
    assert sorted(set(hub.downloads)) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert hub.downloads[-1] == "model.safetensors"
    assert "Bearer hf_secret" in hub.authorization
    assert any(done > 0 for _, done, _ in answer["reports"])
    assert {stage for stage, _, _ in answer["reports"]} == {f"download {NAME}"}

    hub.downloads.clear()
    hub.status = 500
    assert run(hub, home, repr(NAME))["result"][0] == path
    assert run(hub, home, f"{NAME!r}, offline=True, allow_download=True")["result"][0] == path
    assert run(hub, home, DOWNLOAD, HF_HUB_OFFLINE="1")["result"][0] == path
    assert run(hub, home, DOWNLOAD)["result"][0] == path
    assert hub.downloads == []


def test_an_unsafe_model_is_refused_before_its_weights_are_fetched(
    hub: FakeHub, repository: Path, tmp_path: Path
) -> None:
    config = json.loads((repository / "config.json").read_text())
    (repository / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling.Model"}}))
    assert run(hub, tmp_path, DOWNLOAD)["result"]["error"] == "UnsafeModel"
    assert "model.safetensors" not in hub.downloads


def test_a_repository_of_pickles_is_refused(hub: FakeHub, repository: Path, tmp_path: Path) -> None:
    (repository / "model.safetensors").unlink()
    result = run(hub, tmp_path, DOWNLOAD)["result"]
    assert result["error"] == "InvalidModel"
    assert "no model*.safetensors" in result["text"]
    assert "pytorch_model.bin" not in hub.downloads


@pytest.mark.parametrize(
    ("status", "code", "error", "text"),
    [
        (404, "RepoNotFound", "ModelNotFound", "check the spelling"),
        (401, "RepoNotFound", "ModelNotFound", "HF_TOKEN"),
        (403, "GatedRepo", "ModelDownloadFailed", "accept its terms"),
        (500, "", "ModelDownloadFailed", "try again"),
    ],
)
def test_refusals_of_the_hub(hub: FakeHub, tmp_path: Path, status: int, code: str, error: str, text: str) -> None:
    hub.status, hub.error_code = status, code
    result = run(hub, tmp_path, DOWNLOAD)["result"]
    assert result["error"] == error
    assert text in result["text"]


def test_revisions(hub: FakeHub, tmp_path: Path) -> None:
    assert run(hub, tmp_path, f"{DOWNLOAD}, revision='main'")["result"][1] == COMMIT
    result = run(hub, tmp_path, f"{DOWNLOAD}, revision='nowhere'")["result"]
    assert result["error"] == "ModelNotFound"
    assert "no revision 'nowhere'" in result["text"]


def test_a_half_fetched_model_is_not_used_offline(hub: FakeHub, tmp_path: Path) -> None:
    path = Path(run(hub, tmp_path, DOWNLOAD)["result"][0])
    (path / "model.safetensors").unlink()
    result = run(hub, tmp_path, repr(NAME))["result"]
    assert result["error"] == "ModelNotFound"
    assert "models pull" in result["text"]


def test_reachability_is_bounded(hub: FakeHub, tmp_path: Path) -> None:
    assert run(hub, tmp_path, "", "hub.is_reachable()")["result"] is True
    nowhere = "http://127.0.0.1:9"
    assert run(hub, tmp_path, "", "hub.is_reachable(0.5)", HF_ENDPOINT=nowhere)["result"] is False


def test_the_catalog_lists_and_removes_hub_models(hub: FakeHub, tmp_path: Path) -> None:
    run(hub, tmp_path, "", f"str(catalog.pull({NAME!r}).path)")
    expression = "[[m.name, m.kind, m.revision, m.architecture, m.problem] for m in catalog.list_models()]"
    assert run(hub, tmp_path, "", expression)["result"] == [[NAME, "hub", COMMIT, "llama", ""]]
    assert run(hub, tmp_path, "", f"catalog.remove_model({NAME!r})")["result"] > 500_000
    assert run(hub, tmp_path, "", expression)["result"] == []
    assert run(hub, tmp_path, "", f"catalog.model_info({NAME!r})")["result"]["error"] == "ModelNotFound"
