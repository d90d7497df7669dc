"""Which GGUF architectures can be converted, and how each maps to mlx-lm's model of the same name.

A family turns metadata into a `config.json` and every tensor name into mlx-lm's, and states the shape each
tensor must have. What the metadata claims is believed only as far as the tensors bear it out: a layer count
or a vocabulary without the weights to match is an error here, not an allocation later.

llama.cpp's changes to weights that are undone: rows of llama's query and key projections are permuted per
head (interleaved rotary halves); Gemma's norm weights have one added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from .errors import InvalidModel, UnsupportedModel
from .gguf_file import GgufFile, GgufTensor
from .gguf_metadata import Metadata
from .gguf_rope import FREQUENCY_TENSOR, rope_scaling

Config = dict[str, Any]
Expected = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor of the file (or of one block): mlx-lm's name and the shape it must have."""

GEMMA3_27B_LAYERS = 62
"""Gemma 3 27B alone scales queries by hidden size over heads; llama.cpp tells it by its layer count too."""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One supported architecture.

    Attributes:
        architecture: `general.architecture` of the file.
        model_type: mlx-lm's module.
        half: the 16-bit type its activations survive in; float16 keeps GGUF's scales exact.
        permuted: query and key rows are permuted per head.
        norm_offset: added to every norm weight.
        norms: norm tensors of a block, and mlx-lm's names.
        head_norms: each head's queries and keys are normalised.
        biases: block tensors that must have a bias.
        optional_biases: block tensors that have one in all blocks or in none.
        extra: configuration that only this family has.
    """

    architecture: str
    model_type: str
    half: Literal["float16", "bfloat16"]
    permuted: bool = False
    norm_offset: float = 0.0
    norms: dict[str, str]
    head_norms: bool = False
    biases: tuple[str, ...] = ()
    optional_biases: tuple[str, ...] = ()
    extra: Callable[[GgufFile, Metadata, Config], Config]


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A file matched to its family.

    Attributes:
        family: the architecture.
        config: content of `config.json`, without token ids and quantisation.
        names: each tensor of the file that is converted, and mlx-lm's name for it.
    """

    family: Family
    config: Config
    names: dict[str, str]


def match_family(file: GgufFile) -> Layout:
    """Match `file` to a supported architecture.

    Raises `UnsupportedModel` for another architecture or extra tensors, `InvalidModel` for metadata and
    tensors that contradict each other.
    """
    metadata = Metadata(file)
    family = FAMILIES.get(metadata.architecture)
    if family is None:
        raise UnsupportedModel(
            f"{file.path} has the architecture {metadata.architecture or 'none'!r}; GGUF files of "
            f"{', '.join(FAMILIES)} can be converted. Use the model in MLX or safetensors format instead."
        )
    if metadata.has("split.count") and metadata.integer("split.count", least=0) > 1:
        raise UnsupportedModel(
            f"{file.path} is one part of a split file. Join the parts with `llama-gguf-split --merge` first."
        )
    config = _config(file, metadata, family)
    return Layout(family=family, config=config, names=_names(family, config, file))


def _config(file: GgufFile, metadata: Metadata, family: Family) -> Config:
    def integer(key: str, default: int | None = None) -> int:
        return metadata.integer(metadata.scoped(key), default)

    hidden, heads = integer("embedding_length"), integer("attention.head_count")
    head_dim = integer("attention.key_length", hidden // heads if hidden % heads == 0 else None)
    key_value_heads = integer("attention.head_count_kv", heads)
    if heads % key_value_heads or head_dim % 2:
        raise InvalidModel(
            f"{file.path} has {heads} heads of {head_dim} over {key_value_heads} key heads, which no model "
            "has. Use another file."
        )
    theta = metadata.number(metadata.scoped("rope.freq_base"), 10000.0)
    config: Config = {
        "model_type": family.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": _layer_count(file, integer("block_count")),
        "intermediate_size": integer("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "rms_norm_eps": metadata.number(metadata.scoped("attention.layer_norm_rms_epsilon")),
        "vocab_size": _tensor(file, "token_embd.weight").shape[0],
        "max_position_embeddings": integer("context_length"),
        "rope_theta": theta,
        "rope_scaling": rope_scaling(file, metadata, theta, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    return config | family.extra(file, metadata, config)


def _layer_count(file: GgufFile, claimed: int) -> int:
    """The claimed number of layers, once the last of them is known to exist and no later one does."""
    first, last, beyond = (f"blk.{i}.attn_q.weight" in file.tensors for i in (0, claimed - 1, claimed))
    if not first or not last or beyond:
        raise InvalidModel(f"{file.path} claims {claimed} layers but holds others. Download it again.")
    return claimed


def _tensor(file: GgufFile, name: str) -> GgufTensor:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise InvalidModel(f"{file.path} lacks the tensor {name!r}. Download it again or use another file.")
    return tensor


def _names(family: Family, config: Config, file: GgufFile) -> dict[str, str]:
    """mlx-lm's name of each tensor, all shapes checked, none missing and none left over."""
    required = _top_tensors(config) | _block_tensors(family, config, file)
    for name, (_, shape) in required.items():
        if _tensor(file, name).shape != shape:
            raise InvalidModel(
                f"{file.path}: tensor {name!r} has the shape {file.tensors[name].shape}, the metadata says "
                f"{shape}. Download it again or use another file."
            )
    unknown = [name for name in file.tensors if name not in required and name != FREQUENCY_TENSOR]
    if unknown:
        raise UnsupportedModel(
            f"{file.path}: {len(unknown)} tensors such as {unknown[0]!r} have no place in mlx-lm's "
            f"{family.model_type}. Use the original model in MLX format."
        )
    return {name: required[name][0] for name in file.tensors if name in required}


def _top_tensors(config: Config) -> Expected:
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    tensors: Expected = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocabulary, hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        tensors["output.weight"] = ("lm_head.weight", (vocabulary, hidden))
    return tensors


def _block_tensors(family: Family, config: Config, file: GgufFile) -> Expected:
    linears, hidden = _linears(config), config["hidden_size"]
    optional = [part for part in family.optional_biases if f"blk.0.{part}.bias" in file.tensors]
    parts: Expected = {f"{part}.weight": (f"{name}.weight", shape) for part, (name, shape) in linears.items()}
    for part in (*family.biases, *optional):
        name, shape = linears[part]
        parts[f"{part}.bias"] = (f"{name}.bias", shape[:1])
    parts |= {f"{part}.weight": (f"{name}.weight", (hidden,)) for part, name in family.norms.items()}
    if family.head_norms:
        for letter in "qk":
            name = f"self_attn.{letter}_norm.weight"
            parts[f"attn_{letter}_norm.weight"] = (name, (config["head_dim"],))
    return {
        f"blk.{layer}.{part}": (f"model.layers.{layer}.{name}", shape)
        for layer in range(config["num_hidden_layers"])
        for part, (name, shape) in parts.items()
    }


def _linears(config: Config) -> Expected:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    return {
        "attn_q": ("self_attn.q_proj", (queries, hidden)),
        "attn_k": ("self_attn.k_proj", (keys, hidden)),
        "attn_v": ("self_attn.v_proj", (keys, hidden)),
        "attn_output": ("self_attn.o_proj", (hidden, queries)),
        "ffn_gate": ("mlp.gate_proj", (inner, hidden)),
        "ffn_up": ("mlp.up_proj", (inner, hidden)),
        "ffn_down": ("mlp.down_proj", (hidden, inner)),
    }


def _llama(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": False}


def _qwen2(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    if config["num_attention_heads"] * config["head_dim"] != config["hidden_size"]:
        raise InvalidModel(f"{file.path}: heads times their size is not the hidden size. Use another file.")
    return {}


def _qwen3(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    return {}


def _gemma3(file: GgufFile, metadata: Metadata, config: Config) -> Config:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    is_27b = config["num_hidden_layers"] == GEMMA3_27B_LAYERS
    return {
        "query_pre_attn_scalar": hidden // heads if is_27b else config["head_dim"],
        "sliding_window": metadata.integer(metadata.scoped("attention.sliding_window")),
        "sliding_window_pattern": metadata.integer(metadata.scoped("attention.sliding_window_pattern"), 6),
        "rope_local_base_freq": metadata.number(metadata.scoped("rope.freq_base_swa"), 10000.0),
        "hidden_activation": "gelu_pytorch_tanh",
    }


_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GEMMA3_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

FAMILIES = {
    family.architecture: family
    for family in (
        Family(
            architecture="llama",
            model_type="llama",
            half="float16",
            permuted=True,
            norms=_NORMS,
            optional_biases=("attn_q", "attn_k", "attn_v", "attn_output"),
            extra=_llama,
        ),
        Family(
            architecture="qwen2",
            model_type="qwen2",
            half="bfloat16",
            norms=_NORMS,
            biases=("attn_q", "attn_k", "attn_v"),
            extra=_qwen2,
        ),
        Family(
            architecture="qwen3",
            model_type="qwen3",
            half="bfloat16",
            norms=_NORMS,
            head_norms=True,
            extra=_qwen3,
        ),
        Family(
            architecture="gemma3",
            model_type="gemma3_text",
            half="bfloat16",
            norm_offset=-1.0,
            norms=_GEMMA3_NORMS,
            head_norms=True,
            extra=_gemma3,
        ),
    )
}
