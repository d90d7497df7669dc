"""Names become checked folders; nothing unsafe or unsupported gets through, nothing is fetched unasked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mlx_troupe.runtime.models import hub
from mlx_troupe.runtime.models import resolve as resolve_module
from mlx_troupe.runtime.models.demo import SERVED_NAME, demo_folder
from mlx_troupe.runtime.models.errors import (
    InvalidModel,
    ModelDownloadFailed,
    ModelError,
    ModelNotFound,
    UnsafeModel,
    UnsupportedModel,
)
from mlx_troupe.runtime.models.gguf_convert import Form, write_conversion
from mlx_troupe.runtime.models.resolve import resolve
from mlx_troupe.runtime.models.supported import supported_architectures

from .gguf_models import build_pair
from .tiny import build_tiny

if TYPE_CHECKING:
    from mlx_troupe.runtime.models.progress import Progress


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def change(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_a_local_folder(tiny: Path) -> None:
    spec = resolve(str(tiny), quantize="q8")
    assert (spec.path, spec.source, spec.served_name, spec.quantize) == (tiny, "folder", "tiny-llama", "q8")
    assert resolve(str(tiny), served_name="mine").served_name == "mine"


def test_a_gguf_file_is_converted_once_with_progress(tmp_path: Path) -> None:
    path, _ = build_pair("llama", tmp_path)
    reports: list[Progress] = []
    spec = resolve(str(path), progress=reports.append)
    assert (spec.source, spec.served_name) == ("gguf", "model")
    assert (reports[0].done, reports[-1].done) == (0, reports[-1].total)
    assert spec.path.is_relative_to(tmp_path / "cache")
    reports.clear()
    assert resolve(str(path), progress=reports.append).path == spec.path
    assert reports == []


@pytest.mark.parametrize("name", ["", "no such model", "./missing", "a/b/c", "missing.gguf", "~/missing"])
def test_an_unknown_name(name: str) -> None:
    with pytest.raises(ModelNotFound):
        resolve(name)


def test_a_hub_id_without_permission_to_download_says_how_to_fetch_it() -> None:
    with pytest.raises(ModelNotFound, match="mlx-troupe models pull mlx-community/Something"):
        resolve("mlx-community/Something")


def test_the_demo_without_permission_to_download_says_how_to_fetch_it() -> None:
    with pytest.raises(ModelNotFound, match="mlx-troupe models pull demo"):
        resolve("demo", offline=True, allow_download=True)


def test_revision_is_for_hub_models_only(tiny: Path) -> None:
    for name in (str(tiny), "demo", None):
        with pytest.raises(ModelError, match="revision"):
            resolve(name, revision="main")


@pytest.fixture
def cached_demo(tmp_path: Path) -> Path:
    """A tiny conversion in the place of the demo model's."""
    path, _ = build_pair("llama", tmp_path)
    target = tmp_path / "cache" / "models" / f"{SERVED_NAME}-float32-v1"
    target.parent.mkdir(parents=True)
    write_conversion(path, target, Form("float32"), origin="test")
    return target


def test_a_cached_demo_needs_no_permission(cached_demo: Path) -> None:
    assert demo_folder(form=Form("float32")) == cached_demo


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch, cached_demo: Path) -> None:
    """A machine where the hub's model would be the default; its demo model is in the cache."""
    monkeypatch.setattr(resolve_module, "is_linux_cpu", lambda: False)
    monkeypatch.setattr("mlx_troupe.runtime.models.demo.default_form", lambda: Form("float32"))
    monkeypatch.setattr(hub, "is_reachable", lambda: True)


@pytest.mark.usefixtures("gpu_machine")
def test_nothing_named_takes_the_hubs_model_where_it_is_in_reach(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    fetched: list[str] = []

    def download(name: str, *_: object) -> Path:
        fetched.append(name)
        return tiny

    monkeypatch.setattr(hub, "download_snapshot", download)
    assert resolve(None, allow_download=True).served_name == resolve_module.DEFAULT_HUB_MODEL
    assert fetched == [resolve_module.DEFAULT_HUB_MODEL]


@pytest.mark.usefixtures("gpu_machine")
def test_nothing_named_falls_back_to_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Path:
        raise ModelDownloadFailed("the hub is down.")

    monkeypatch.setattr(hub, "download_snapshot", fail)
    assert resolve(None, allow_download=True).source == "demo"
    assert resolve(None, allow_download=False).source == "demo"
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    assert resolve(None, allow_download=True).source == "demo"


@pytest.mark.usefixtures("cached_demo")
def test_nothing_named_on_a_linux_processor_is_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_module, "is_linux_cpu", lambda: True)
    monkeypatch.setattr("mlx_troupe.runtime.models.demo.default_form", lambda: Form("float32"))
    monkeypatch.setattr(hub, "is_reachable", lambda: pytest.fail("the hub was asked"))
    assert resolve(None, allow_download=True).served_name == SERVED_NAME


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("entry", [{"auto_map": {"AutoModel": "model.Model"}}, {"model_file": "model.py"}])
def test_code_in_a_model_folder_is_refused(folder: Path, name: str, entry: dict[str, Any]) -> None:
    change(folder / name, **entry)
    with pytest.raises(UnsafeModel, match=next(iter(entry))):
        resolve(str(folder))


def test_code_named_in_a_nested_configuration_is_refused(folder: Path) -> None:
    change(folder / "config.json", text_config={"auto_map": {}})
    with pytest.raises(UnsafeModel):
        resolve(str(folder))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pth", "model.pt"])
def test_pickled_weights_are_refused(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(UnsafeModel, match="pickle"):
        resolve(str(folder))


def test_pickles_beside_safetensors_are_ignored(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert resolve(str(folder)).path == folder


def test_an_unsupported_architecture_is_named_with_what_is_supported(folder: Path) -> None:
    change(folder / "config.json", model_type="whisper")
    with pytest.raises(UnsupportedModel, match=r"'whisper'.*gemma3_text.*llama.*qwen3"):
        resolve(str(folder))


@pytest.mark.parametrize("model_type", [None, 7, "../evil", "base", "cache", "rope_utils"])
def test_a_model_type_that_is_no_model(folder: Path, model_type: object) -> None:
    change(folder / "config.json", model_type=model_type)
    with pytest.raises(UnsupportedModel):
        resolve(str(folder))


def test_supported_architectures_include_aliases_and_no_helpers() -> None:
    assert {"llama", "mistral", "gemma3_text", "qwen3_next", "mamba2", "llama4"} <= supported_architectures()
    assert not {"base", "cache", "rope_utils", "switch_layers"} & supported_architectures()


def test_supported_architectures_are_those_mlx_lm_imports() -> None:
    from mlx_lm.utils import MODEL_REMAPPING, _get_classes

    assert set(MODEL_REMAPPING) <= supported_architectures()
    for name in ("llama", "mistral", "lfm2", "gemma3n", "lille-130m", "falcon_mamba"):
        assert _get_classes({"model_type": name})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "JSON object"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no model"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer"),
    ],
)
def test_a_damaged_folder(folder: Path, damage: Any, message: str) -> None:
    damage(folder)
    with pytest.raises(InvalidModel, match=message):
        resolve(str(folder))


def test_a_folder_of_gguf_files_points_to_the_file(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.gguf")
    with pytest.raises(UnsupportedModel, match=r"\.gguf file itself"):
        resolve(str(folder))
