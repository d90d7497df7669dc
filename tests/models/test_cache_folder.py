"""The cache: folders appear whole or not at all, processes take turns, leftovers go, models can be removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType as Block
from safetensors import safe_open

from mlx_troupe.runtime.models import cache_folder, catalog
from mlx_troupe.runtime.models.cache_folder import build_folder, default_cache_folder, locked
from mlx_troupe.runtime.models.errors import ModelError, ModelNotFound
from mlx_troupe.runtime.models.gguf_convert import Form, convert_gguf, is_complete

from .gguf_models import build_pair


@pytest.mark.parametrize(
    ("variables", "platform", "expected"),
    [
        ({"MLX_TROUPE_CACHE": "/x", "XDG_CACHE_HOME": "/y"}, "linux", Path("/x")),
        ({"XDG_CACHE_HOME": "/y"}, "linux", Path("/y/mlx-troupe")),
        ({}, "linux", Path.home() / ".cache" / "mlx-troupe"),
        ({}, "darwin", Path.home() / "Library" / "Caches" / "mlx-troupe"),
    ],
)
def test_where_the_cache_is(variables: dict[str, str], platform: str, expected: Path) -> None:
    assert default_cache_folder(variables, platform) == expected


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with locked(target), build_folder(target) as folder:
        (folder / "file").touch()
        assert not target.exists()
    assert [path.name for path in target.iterdir()] == ["file"]


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "target"

    def fail() -> None:
        with locked(target), build_folder(target) as folder:
            (folder / "file").touch()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == [".target.lock"]


def test_leftovers_of_a_killed_process_are_swept(tmp_path: Path) -> None:
    for name in (".target.abc", ".target-two.abc"):
        (tmp_path / name).mkdir()
    with locked(tmp_path / "target"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".target-two.abc", ".target.lock"]


def test_a_full_disk_is_said_before_work_begins(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="MLX_TROUPE_CACHE"), build_folder(tmp_path / "target", needed_bytes=1 << 60):
        pytest.fail("it began")


def test_an_unwritable_cache_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="MLX_TROUPE_CACHE"), locked(tmp_path / "file" / "target"):
        pytest.fail("it began")


def test_a_write_error_during_a_conversion_is_a_model_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = build_pair("llama", tmp_path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlx_troupe.runtime.models.gguf_convert.write_weights", fail)
    with pytest.raises(ModelError, match="No space left on device"):
        convert_gguf(path, form=Form("float32"))


def test_two_processes_convert_once(tmp_path: Path) -> None:
    path, _ = build_pair("llama", tmp_path)
    code = (
        "import logging, sys; from pathlib import Path; logging.basicConfig(level=logging.INFO);"
        "from mlx_troupe.runtime.models.gguf_convert import Form, convert_gguf;"
        "print(convert_gguf(Path(sys.argv[1]), form=Form('float32')))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    folders = {out.strip() for out, _ in outputs}
    assert len(folders) == 1
    assert is_complete(Path(folders.pop()))
    assert sum(err.count("converting") for _, err in outputs) == 1


def test_a_damaged_conversion_is_made_again(tmp_path: Path) -> None:
    path, _ = build_pair("llama", tmp_path)
    folder = convert_gguf(path, form=Form("float32"))
    os.truncate(folder / "model.safetensors", 1000)
    assert not is_complete(folder)
    assert is_complete(convert_gguf(path, form=Form("float32")))


def test_conversions_are_listed_described_and_removed(tmp_path: Path) -> None:
    path, _ = build_pair("llama", tmp_path, block=Block.Q4_0)
    folder = convert_gguf(path, form=Form("packed"))
    (model,) = catalog.list_models()
    assert (model.name, model.kind, model.architecture, model.problem) == (str(folder), "converted", "llama", "")
    assert model.quantisation == "4 bits, groups of 32"
    assert model.origin == str(path)
    assert model.size_bytes == cache_folder.folder_bytes(folder)
    assert catalog.model_info(folder.name) == [model]
    assert catalog.remove_model(folder.name) == model.size_bytes
    assert catalog.list_models() == []
    with pytest.raises(ModelNotFound, match="models list"):
        catalog.remove_model(folder.name)


def test_a_conversion_that_cannot_be_served_says_why(tmp_path: Path) -> None:
    path, _ = build_pair("llama", tmp_path)
    folder = convert_gguf(path, form=Form("float32"))
    (folder / "tokenizer.json").unlink()
    (model,) = catalog.list_models()
    assert "no tokenizer" in model.problem


def test_the_manifest_holds_a_digest_of_every_tensor(tmp_path: Path) -> None:
    path, _ = build_pair("llama", tmp_path)
    folder = convert_gguf(path, form=Form("float32"))
    manifest = json.loads((folder / "manifest.json").read_text())
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        assert sorted(manifest["tensors"]) == sorted(file.keys())
