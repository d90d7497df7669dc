"""GGUF files of tiny random models, and the same tensors as an mlx-lm model: what a conversion must equal.

The file is written as llama.cpp's converter does: query and key rows of llama permuted per head, one added
to Gemma's norms, matrices in the block type asked for. The reference gets the decoded values.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Block

from benchmarks.tiny_tokenizer import SPECIAL_TOKENS, tokenizer_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VOCABULARY = 320
LAYERS = 4
HEADS, KEY_HEADS = 4, 2
WINDOW = 16
CONTROL, NORMAL = 3, 1

SCALES_AT = {
    Block.Q2_K: (80, 82), Block.Q3_K: (108,), Block.Q4_K: (0, 2), Block.Q5_K: (0, 2), Block.Q6_K: (208,),
    Block.IQ4_NL: (0,), Block.IQ4_XS: (0,),
}  # fmt: skip
"""Where the float16 constants of block types without a writer lie: random blocks need sane ones."""

BLOCK_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
NORM_NAMES = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORM_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}


def model_config(architecture: str, *, hidden: int = 64, tied: bool = True, **changes: Any) -> dict[str, Any]:
    """mlx-lm's configuration of the reference."""
    config = {
        "model_type": MODEL_TYPES[architecture],
        "hidden_size": hidden,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": hidden // HEADS,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rope_theta": 50000.0,
        "tie_word_embeddings": tied,
    }
    if architecture == "gemma3":
        config |= {"query_pre_attn_scalar": hidden // HEADS, "sliding_window": WINDOW, "sliding_window_pattern": 2}
    return config | changes


def random_blocks(shape: tuple[int, int], block: Block, random: np.random.Generator) -> np.ndarray:
    """Encoded rows, uint8, of normally distributed weights, or random bits where gguf cannot encode."""
    values = random.normal(0, 2 / np.sqrt(shape[1]), shape).astype(np.float32)
    try:
        return quants.quantize(values, block).view(np.uint8)
    except NotImplementedError:
        return _random_bits(shape, block, random)


def _random_bits(shape: tuple[int, int], block: Block, random: np.random.Generator) -> np.ndarray:
    elements, size = GGML_QUANT_SIZES[block]
    blocks = random.integers(0, 256, (shape[0] * shape[1] // elements, size), dtype=np.uint8)
    raw = blocks.reshape(shape[0], -1)
    # Random bits make much larger values than trained weights; bring them to the usual spread.
    for at in SCALES_AT[block]:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    factor = 2 / np.sqrt(shape[1]) / quants.dequantize(raw, block).std()
    for at in SCALES_AT[block]:
        scales = (factor * random.uniform(0.5, 1.5, len(blocks))).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return raw


def build_pair(
    architecture: str,
    folder: Path,
    *,
    block: Block = Block.F32,
    config: dict[str, Any] | None = None,
    seed: int = 0,
    edit: Callable[[GGUFWriter], None] | None = None,
) -> tuple[Path, Path]:
    """Write `model.gguf`, and `reference/` with the same weights as mlx-lm loads them; returns both paths.

    `edit` adds metadata to the file before it is written.
    """
    config = config or model_config(architecture)
    random = np.random.default_rng(seed)
    path, reference = folder / "model.gguf", folder / "reference"
    reference.mkdir(parents=True)
    writer = GGUFWriter(path, architecture)
    write_metadata(writer, architecture, config)
    write_tokens(writer)
    if edit is not None:
        edit(writer)
    weights = {
        name: _add_tensor(writer, architecture, name, shape, block, random, config)
        for name, shape in parameter_shapes(config)
    }
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _write_reference(reference, config, weights)
    return path, reference


def parameter_shapes(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of mlx-lm's model of `config`."""
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(dict(config)))
    if config["tie_word_embeddings"]:
        model.pop("lm_head", None)
    return [(name, tuple(value.shape)) for name, value in tree_flatten(model.parameters())]


def gguf_name(architecture: str, name: str) -> str:
    """llama.cpp's name of mlx-lm's parameter `name`."""
    module, _, kind = name.rpartition(".")
    if module in TOP_NAMES:
        return f"{TOP_NAMES[module]}.{kind}"
    norms = GEMMA_NORM_NAMES if architecture == "gemma3" else NORM_NAMES
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{(BLOCK_NAMES | norms)[part]}.{kind}"


def _add_tensor(
    writer: GGUFWriter,
    architecture: str,
    name: str,
    shape: tuple[int, ...],
    block: Block,
    random: np.random.Generator,
    config: dict[str, Any],
) -> np.ndarray:
    """Add one random tensor to the file; returns what mlx-lm's parameter must be."""
    heads = _permuted_heads(architecture, name, config)
    if len(shape) == 1:
        values = random.normal(0, 0.2, shape).astype(np.float32)
        stored = values + 1 if architecture == "gemma3" else values
        writer.add_tensor(gguf_name(architecture, name), permuted(stored, heads) if heads else stored)
        # Adding and taking away one rounds; the reference must have rounded as well.
        return stored - 1 if architecture == "gemma3" else values
    raw = random_blocks((shape[0], shape[1]), block, random)
    stored = permuted(raw, heads) if heads else raw
    writer.add_tensor(gguf_name(architecture, name), stored, raw_dtype=block)
    return quants.dequantize(raw, block)


def _permuted_heads(architecture: str, name: str, config: dict[str, Any]) -> int:
    if architecture != "llama":
        return 0
    if ".q_proj." in name:
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if ".k_proj." in name else 0


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's `convert_hf_to_gguf.py`."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weights.shape))


def write_metadata(writer: GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    """The keys llama.cpp's converter writes for these families."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if architecture in ("qwen3", "gemma3"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if architecture == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_uint32("gemma3.attention.sliding_window_pattern", config["sliding_window_pattern"])


def write_tokens(writer: GGUFWriter, splitter: str = "smollm") -> None:
    """The byte-level tokenizer of the tiny models."""
    model = json.loads(tokenizer_json(VOCABULARY))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = set(SPECIAL_TOKENS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in special else NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")


def _write_reference(folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
    import mlx.core as mx

    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: mx.array(value) for name, value in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
