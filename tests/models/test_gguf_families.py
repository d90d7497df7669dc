"""A converted GGUF file gives the logits of the same tensors in mlx-lm's own model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType as Block
from mlx_lm.utils import load_model

from mlx_troupe.runtime.models import gguf_convert
from mlx_troupe.runtime.models.errors import InvalidModel, ModelError, UnsupportedModel
from mlx_troupe.runtime.models.gguf_convert import Form, convert_gguf, default_form
from mlx_troupe.runtime.models.gguf_rope import llama3_divisors

from .gguf_models import MODEL_TYPES, VOCABULARY, build_pair, model_config

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = list(MODEL_TYPES)
WRITTEN_BLOCKS = [Block.F16, Block.BF16, Block.Q4_0, Block.Q4_1, Block.Q5_0, Block.Q5_1, Block.Q8_0]
SUPER_BLOCKS = [Block.Q2_K, Block.Q3_K, Block.Q4_K, Block.Q5_K, Block.Q6_K, Block.IQ4_XS]
TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, 40).tolist()
"""More than two sliding windows."""


def logits(folder: Path) -> np.ndarray:
    model, _ = load_model(folder, strict=True)
    return np.array(model(mx.array([TOKENS])).astype(mx.float32))[0]


def converted(path: Path, *form: Any) -> Path:
    return convert_gguf(path, form=Form(*form))


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_conversion_equals_the_reference_exactly(family: str, tmp_path: Path) -> None:
    path, reference = build_pair(family, tmp_path)
    np.testing.assert_array_equal(logits(converted(path, "float32")), logits(reference))


@pytest.mark.parametrize("family", FAMILIES)
def test_untied_output_weights_are_kept(family: str, tmp_path: Path) -> None:
    path, reference = build_pair(family, tmp_path, config=model_config(family, tied=False))
    folder = converted(path, "float32")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    np.testing.assert_array_equal(logits(folder), logits(reference))


@pytest.mark.parametrize("block", WRITTEN_BLOCKS, ids=lambda block: block.name)
def test_every_writable_block_type_is_decoded(block: Block, tmp_path: Path) -> None:
    path, reference = build_pair("llama", tmp_path, block=block)
    np.testing.assert_array_equal(logits(converted(path, "float32")), logits(reference))


@pytest.mark.parametrize("block", SUPER_BLOCKS, ids=lambda block: block.name)
def test_every_super_block_type_is_decoded(block: Block, tmp_path: Path) -> None:
    config = model_config("qwen3", hidden=256, num_hidden_layers=2)
    path, reference = build_pair("qwen3", tmp_path, block=block, config=config)
    np.testing.assert_array_equal(logits(converted(path, "float32")), logits(reference))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block", [Block.Q4_0, Block.Q4_1, Block.Q5_0, Block.Q5_1, Block.Q8_0], ids=lambda b: b.name)
def test_packed_conversion_keeps_every_weight(family: str, block: Block, tmp_path: Path) -> None:
    path, reference = build_pair(family, tmp_path, block=block)
    folder = converted(path, "packed")
    assert json.loads((folder / "config.json").read_text())["quantization"]["group_size"] == 32
    assert dequantised(folder).keys() == arrays(reference).keys()
    for name, value in arrays(reference).items():
        np.testing.assert_array_equal(dequantised(folder)[name], value, err_msg=name)


@pytest.mark.parametrize("block", [Block.Q4_K, Block.Q5_K], ids=lambda block: block.name)
def test_packed_super_blocks_keep_every_weight(block: Block, tmp_path: Path) -> None:
    config = model_config("qwen3", hidden=256, num_hidden_layers=2)
    path, reference = build_pair("qwen3", tmp_path, block=block, config=config)
    folder = converted(path, "packed")
    np.testing.assert_allclose(logits(folder), logits(reference), atol=2e-3)
    for name, value in arrays(reference).items():
        np.testing.assert_allclose(dequantised(folder)[name], value, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("family", "half"), [("llama", "float16"), ("qwen3", "bfloat16"), ("gemma3", "bfloat16")])
def test_packed_half_scales_are_the_type_the_family_survives_in(family: str, half: str, tmp_path: Path) -> None:
    path, reference = build_pair(family, tmp_path, block=Block.Q4_1)
    folder = converted(path, "packed", "half")
    types = {str(value.dtype) for value in mx.load(str(folder / "model.safetensors")).values()}
    assert types == {"mlx.core.uint32", f"mlx.core.{half}"}
    np.testing.assert_allclose(logits(folder), logits(reference), atol=0.05 if half == "float16" else 0.4)


def test_packed_q6_k_is_requantised_to_8_bits_closely(tmp_path: Path) -> None:
    config = model_config("qwen3", hidden=256, num_hidden_layers=2)
    path, reference = build_pair("qwen3", tmp_path, block=Block.Q6_K, config=config)
    folder = converted(path, "packed")
    for name, value in arrays(reference).items():
        error = np.abs(dequantised(folder)[name] - value).max()
        assert error <= np.abs(value).max() / 127, name


@pytest.mark.parametrize(("weights", "tolerance"), [("float16", 0.02), ("bfloat16", 0.15)])
def test_sixteen_bit_conversions_are_close(weights: str, tolerance: float, tmp_path: Path) -> None:
    path, reference = build_pair("llama", tmp_path, block=Block.Q8_0)
    folder = converted(path, weights)
    assert {str(value.dtype) for value in mx.load(str(folder / "model.safetensors")).values()} == {
        f"mlx.core.{weights}"
    }
    np.testing.assert_allclose(logits(folder), logits(reference), atol=tolerance)


def test_biases_of_llama_are_unpermuted_too(tmp_path: Path) -> None:
    config = model_config("llama", attention_bias=True)
    path, reference = build_pair("llama", tmp_path, config=config)
    np.testing.assert_array_equal(logits(converted(path, "float32")), logits(reference))


def test_llama3_rotary_table_becomes_parameters(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = model_config("llama", rope_theta=500000.0, rope_scaling=scaling)

    def add_table(writer: GGUFWriter) -> None:
        table = llama3_divisors(500000.0, 16, 8.0, 1.0, 4.0, 8192).astype(np.float32)
        writer.add_tensor("rope_freqs.weight", table)

    path, reference = build_pair("llama", tmp_path, config=config, edit=add_table)
    folder = converted(path, "float32")
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == scaling
    np.testing.assert_array_equal(logits(folder), logits(reference))


def test_linear_rotary_scaling_reaches_global_layers_of_gemma(tmp_path: Path) -> None:
    config = model_config("gemma3", rope_scaling={"type": "linear", "factor": 8.0})

    def add_scaling(writer: GGUFWriter) -> None:
        writer.add_string("gemma3.rope.scaling.type", "linear")
        writer.add_float32("gemma3.rope.scaling.factor", 8.0)

    path, reference = build_pair("gemma3", tmp_path, config=config, edit=add_scaling)
    np.testing.assert_array_equal(logits(converted(path, "float32")), logits(reference))


def test_yarn_parameters_reach_the_model(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = model_config("qwen2", rope_scaling=scaling)

    def add_scaling(writer: GGUFWriter) -> None:
        writer.add_string("qwen2.rope.scaling.type", "yarn")
        writer.add_float32("qwen2.rope.scaling.factor", 4.0)
        writer.add_uint32("qwen2.rope.scaling.original_context_length", 512)

    path, reference = build_pair("qwen2", tmp_path, config=config, edit=add_scaling)
    np.testing.assert_array_equal(logits(converted(path, "float32")), logits(reference))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda writer: writer.add_string("llama.rope.scaling.type", "longrope"), "longrope"),
        (lambda writer: writer.add_uint32("llama.rope.dimension_count", 8), "rotates 8 of 16"),
        (lambda writer: writer.add_uint16("split.count", 3), "llama-gguf-split"),
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.full(8, 3, np.float32)), "none of Llama 3's"),
    ],
)
def test_what_cannot_be_expressed_is_refused(edit: Any, message: str, tmp_path: Path) -> None:
    path, _ = build_pair("llama", tmp_path, edit=edit)
    with pytest.raises(UnsupportedModel, match=message):
        converted(path, "float32")


def test_a_model_too_large_for_float32_stays_packed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gguf_convert, "is_linux_cpu", lambda: True)
    assert default_form(10**9, memory_bytes=8 << 30) == Form("float32")
    assert default_form(8 * 10**9, memory_bytes=16 << 30) == Form("packed", "float32")
    assert "too much for this machine" in caplog.text
    monkeypatch.setattr(gguf_convert, "is_linux_cpu", lambda: False)
    assert default_form(8 * 10**9, memory_bytes=16 << 30) == Form("packed", "half")


def test_same_file_converts_to_same_bytes(tmp_path: Path) -> None:
    path, _ = build_pair("llama", tmp_path, block=Block.Q4_1)
    first = convert_gguf(path, form=Form("packed"), cache_folder=tmp_path / "one")
    second = convert_gguf(path, form=Form("packed"), cache_folder=tmp_path / "two")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "manifest.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_fine_tunes_with_equal_headers_are_kept_apart(tmp_path: Path) -> None:
    first, _ = build_pair("llama", tmp_path / "first", seed=1)
    second, _ = build_pair("llama", tmp_path / "second", seed=2)
    assert converted(first, "float32").name != converted(second, "float32").name


def test_unknown_architecture_is_named_with_what_is_supported(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "starcoder")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"'starcoder'.*llama, qwen2, qwen3, gemma3"):
        converted(path, "float32")


def test_unsupported_block_type_is_named(tmp_path: Path) -> None:
    def add_ternary(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.zeros((1, 54), np.uint8), raw_dtype=Block.TQ1_0)

    path, _ = build_pair("llama", tmp_path, edit=add_ternary)
    with pytest.raises(ModelError, match="TQ1_0"):
        converted(path, "float32")


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    def add_expert(writer: GGUFWriter) -> None:
        writer.add_tensor("blk.0.ffn_gate_inp.weight", np.zeros((4, 64), np.float32))

    path, _ = build_pair("llama", tmp_path, edit=add_expert)
    with pytest.raises(UnsupportedModel, match="ffn_gate_inp"):
        converted(path, "float32")


def test_float_file_cannot_be_packed(tmp_path: Path) -> None:
    path, _ = build_pair("llama", tmp_path, block=Block.F16)
    with pytest.raises(InvalidModel, match="float16"):
        converted(path, "packed")


def test_numbers_of_the_file_reach_the_configuration(tmp_path: Path) -> None:
    path, _ = build_pair("llama", tmp_path)
    config = json.loads((converted(path, "float32") / "config.json").read_text())
    assert config["max_position_embeddings"] == 2048
    assert config["rms_norm_eps"] == 1e-6
    assert config["eos_token_id"] == [258, 256]


def arrays(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in mx.load(str(folder / "model.safetensors")).items()}


def dequantised(folder: Path) -> dict[str, np.ndarray]:
    """The weights of a packed conversion in float32, unpacked by MLX itself."""
    settings = json.loads((folder / "config.json").read_text())["quantization"]
    packed = mx.load(str(folder / "model.safetensors"))
    plain = {}
    for name, value in packed.items():
        module = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if f"{module}.scales" in packed:
            bits = settings.get(module, settings)["bits"]
            scales, biases = packed[f"{module}.scales"], packed[f"{module}.biases"]
            value = mx.dequantize(value, scales, biases, group_size=32, bits=bits)
        plain[name] = np.array(value)
    return plain
