"""Loading: limits, end tokens and sizes that the runtime relies on; quantisation; fingerprints."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from gguf.constants import GGMLQuantizationType as Block
from mlx.utils import tree_flatten

from benchmarks.tiny_tokenizer import EOS_ID
from mlx_troupe.runtime.models.errors import InvalidModel, UnsafeModel
from mlx_troupe.runtime.models.fingerprint import fingerprint
from mlx_troupe.runtime.models.gguf_convert import Form
from mlx_troupe.runtime.models.loader import LoadedModel, load, load_tokenizer
from mlx_troupe.runtime.models.resolve import resolve
from mlx_troupe.runtime.models.spec import ModelSpec

from .gguf_models import build_pair
from .tiny import build_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def spec_of(folder: Path, **settings: Any) -> ModelSpec:
    return ModelSpec(path=folder, name="tiny", served_name="tiny", source="folder", **settings)


def change(path: Path, **entries: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in (content | entries).items() if value is not None}))


def logits(loaded: LoadedModel) -> mx.array:
    return loaded.model(mx.array([[1, 2, 3, 4]]))[0, -1]


def dtypes(loaded: LoadedModel) -> set[str]:
    return {str(value.dtype).removeprefix("mlx.core.") for _, value in tree_flatten(loaded.model.parameters())}


def test_what_the_runtime_is_told(tiny: Path) -> None:
    loaded = load(spec_of(tiny))
    assert (loaded.context_length, loaded.vocab_size, loaded.eos_ids) == (4096, 512, {EOS_ID})
    assert loaded.weight_bytes == sum(value.nbytes for _, value in tree_flatten(loaded.model.parameters()))
    assert loaded.weight_bytes == pytest.approx((tiny / "model.safetensors").stat().st_size, rel=0.01)
    assert loaded.tokenizer.encode("a")


@pytest.mark.parametrize("arch", ["gemma3n", "qwen3_5", "mamba2", "rwkv7"])
def test_limits_of_nested_and_unusual_configurations(arch: str, tmp_path: Path) -> None:
    loaded = load(spec_of(build_tiny(arch, tmp_path)))
    assert loaded.vocab_size == 512
    assert loaded.context_length in (4096, 2056)


def test_no_context_length_is_none(folder: Path) -> None:
    change(folder / "config.json", max_position_embeddings=None)
    change(folder / "tokenizer_config.json", model_max_length=None)
    assert load(spec_of(folder)).context_length is None


def test_end_ids_of_all_files_are_merged_and_checked(folder: Path) -> None:
    change(folder / "config.json", eos_token_id=[256, 100_000])
    change(folder / "generation_config.json", eos_token_id=300)
    loaded = load(spec_of(folder))
    assert loaded.eos_ids == {256, 300, EOS_ID}


def test_a_given_tokenizer_is_used(tiny: Path) -> None:
    tokenizer = load_tokenizer(spec_of(tiny))
    assert load(spec_of(tiny), tokenizer).tokenizer is tokenizer


def test_a_larger_tokenizer_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = build_tiny("llama", tmp_path / "small", vocab=400)
    larger = build_tiny("llama", tmp_path / "large", vocab=512)
    shutil.copy(larger / "tokenizer.json", folder)
    with caplog.at_level(logging.WARNING):
        assert load(spec_of(folder)).vocab_size == 400
    assert "ids up to 511, the model only 399" in caplog.text


def test_weights_that_do_not_fit_are_an_error(folder: Path) -> None:
    change(folder / "config.json", num_hidden_layers=3)
    with pytest.raises(InvalidModel, match="do not fit"):
        load(spec_of(folder))
    change(folder / "config.json", num_hidden_layers="many")
    with pytest.raises(InvalidModel):
        load(spec_of(folder))


def test_damaged_files_are_errors(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidModel, match="tokenizer"):
        load_tokenizer(spec_of(folder))
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(InvalidModel):
        load(spec_of(folder))


def test_code_that_appeared_after_resolving_is_still_refused(folder: Path) -> None:
    spec = resolve(str(folder))
    change(folder / "config.json", model_file="model.py")
    (folder / "model.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(UnsafeModel):
        load(spec)


def test_sixteen_bit_weights_stay_unless_asked(folder: Path) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    half = {name: value.astype(mx.bfloat16) for name, value in weights.items()}
    mx.eval(half)
    mx.save_safetensors(str(folder / "model.safetensors"), half)
    assert dtypes(load(spec_of(folder))) == {"bfloat16"}
    assert dtypes(load(spec_of(folder, cpu_float32=True))) == {"float32"}


@pytest.mark.parametrize(("preset", "bits", "tolerance"), [("q8", 8, 0.3), ("q4", 4, 4.0)])
def test_quantise_on_load(tiny: Path, preset: Any, bits: int, tolerance: float) -> None:
    plain, quantised = load(spec_of(tiny)), load(spec_of(tiny, quantize=preset))
    assert quantised.config["quantization"] == {"group_size": 64, "bits": bits}
    assert quantised.weight_bytes < plain.weight_bytes * bits / 24
    assert mx.abs(logits(quantised) - logits(plain)).max() < tolerance


def test_columns_that_64_does_not_divide_get_groups_of_32(tmp_path: Path) -> None:
    loaded = load(spec_of(build_tiny("deepseek_v3", tmp_path), quantize="q8"))
    settings = loaded.config["quantization"]
    assert settings["model.layers.0.self_attn.q_b_proj"] == {"group_size": 32, "bits": 8}
    assert loaded.model.model.layers[0].self_attn.q_b_proj.group_size == 32
    assert mx.isfinite(logits(loaded)).all()


def test_layers_that_the_model_exempts_keep_its_own_choice(tmp_path: Path) -> None:
    loaded = load(spec_of(build_tiny("qwen3_next", tmp_path), quantize="q4"))
    assert loaded.config["quantization"]["model.layers.0.mlp.gate"]["bits"] == 8


def test_a_quantised_model_is_left_alone_with_a_line_in_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load(spec_of(folder, quantize="q8"))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(loaded.model.parameters())))
    change(folder / "config.json", quantization=loaded.config["quantization"])
    with caplog.at_level(logging.WARNING):
        again = load(spec_of(folder, quantize="q4"))
    assert "already is quantised (8 bits, groups of 64): --quantize q4 is ignored" in caplog.text
    assert mx.array_equal(logits(again), logits(loaded))


def test_four_bits_of_four_bits_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, _ = build_pair("llama", tmp_path, block=Block.Q4_0)
    spec = resolve(str(path), form=Form("float32"))
    with caplog.at_level(logging.WARNING):
        load(msgspec.structs.replace(spec, quantize="q8"))
    assert caplog.text == ""
    load(msgspec.structs.replace(spec, quantize="q4"))
    assert "Q4_0 blocks" in caplog.text


def test_fingerprint_tells_weights_settings_and_configuration_apart(folder: Path, tmp_path: Path) -> None:
    original = fingerprint(spec_of(folder))
    assert original == fingerprint(spec_of(Path(shutil.copytree(folder, tmp_path / "moved"))))
    other = build_tiny("llama", tmp_path / "other", seed=1)
    different = {
        fingerprint(spec_of(other)),
        fingerprint(spec_of(folder, quantize="q8")),
        fingerprint(spec_of(folder, quantize="q4")),
        fingerprint(spec_of(folder, cpu_float32=True)),
    }
    change(folder / "config.json", rope_theta=1.0)
    assert len(different | {original, fingerprint(spec_of(folder))}) == 6


def test_fingerprint_notices_one_changed_matrix(folder: Path) -> None:
    original = fingerprint(spec_of(folder))
    weights = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.01
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    assert fingerprint(spec_of(folder)) != original


def test_fingerprint_of_a_damaged_file_is_an_error(folder: Path) -> None:
    for content in (b"\xff" * 100, (10).to_bytes(8, "little") + b"not json!!"):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(InvalidModel):
            fingerprint(spec_of(folder))
