"""Load a resolved model. `load` runs on the MLX thread; `load_tokenizer` on any thread."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from .errors import InvalidModel
from .gguf_convert import read_manifest
from .machine import is_linux_cpu
from .quantise import quantise
from .safety import check_folder, read_json
from .weights import evaluate, ignore

if TYPE_CHECKING:
    from .spec import ModelSpec
    from .weights import Evaluated

log = logging.getLogger(__name__)

CONTEXT_KEYS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "n_positions", "n_ctx", "seq_length")
EMBEDDINGS = frozenset(
    {
        "embed",
        "embed_in",
        "embed_tokens",
        "embedding",
        "embeddings",
        "tok_embeddings",
        "token_embeddings",
        "word_embeddings",
        "wte",
    }
)
"""What mlx-lm's models call the token embedding."""
NO_LIMIT_TOKENS = 10**9
"""transformers writes a huge `model_max_length` for "unknown"."""


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in memory. Its arrays live and die on the thread that loaded it.

    Attributes:
        model: mlx-lm's model, evaluated.
        tokenizer: mlx-lm's `TokenizerWrapper`.
        config: `config.json`, with generation settings and quantisation merged in.
        context_length: most tokens of prompt and output together; None when the model names no limit.
        vocab_size: rows of the embedding; a token id must be below it, MLX does not check.
        eos_ids: ids that end a generation, from configuration, generation configuration and tokenizer.
        weight_bytes: of all parameters.
    """

    model: Any
    tokenizer: Any
    config: dict[str, Any]
    context_length: int | None
    vocab_size: int
    eos_ids: frozenset[int]
    weight_bytes: int


def load(spec: ModelSpec, tokenizer: Any = None, *, evaluated: Evaluated = ignore) -> LoadedModel:
    """Load the weights of `spec` into memory, and its tokenizer unless it is given.

    `evaluated` hears of each piece of the weights, with bytes done and in all.

    Raises `ModelError`: `UnsafeModel`, `UnsupportedModel`, or `InvalidModel` when the weights do not fit the
    configuration.
    """
    check_folder(spec.path)
    model, config = _load_weights(spec, evaluated)
    if tokenizer is None:
        tokenizer = load_tokenizer(spec)
    vocabulary = _embedding_rows(model, config)
    _warn_of_larger_tokenizer(tokenizer, vocabulary, spec)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        context_length=_context_length(config, tokenizer),
        vocab_size=vocabulary,
        eos_ids=_eos_ids(spec, tokenizer, vocabulary),
        weight_bytes=sum(value.nbytes for _, value in _parameters(model)),
    )


def load_tokenizer(spec: ModelSpec) -> Any:
    """mlx-lm's `TokenizerWrapper` of `spec`; call it once per thread that needs a copy.

    Raises `InvalidModel` when the tokenizer's files are damaged.
    """
    from mlx_lm.utils import load_tokenizer as load_wrapper

    try:
        return load_wrapper(spec.path, {"trust_remote_code": False}, eos_token_ids=_configured_eos_ids(spec))
    except Exception as error:  # transformers, tokenizers and sentencepiece each raise their own
        raise InvalidModel(
            f"The tokenizer in {spec.path} cannot be loaded: {error}. Download the model again."
        ) from error


def _load_weights(spec: ModelSpec, evaluated: Evaluated) -> tuple[Any, dict[str, Any]]:
    from mlx_lm.utils import load_model

    try:
        model, config = load_model(spec.path, lazy=True, strict=True, trust_remote_code=False)
        if spec.cpu_float32 or (spec.quantize is not None and is_linux_cpu()):
            _cast_to_float32(model)
        if spec.quantize is not None:
            _warn_of_second_rounding(spec)
            config = quantise(model, config, spec.quantize)
        evaluate(_parameters(model), evaluated)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OSError) as error:
        raise InvalidModel(
            f"The weights in {spec.path} do not fit its config.json: {error}. Download the model again, or "
            "update mlx-lm if the model is newer than it."
        ) from error
    return model, config


def _warn_of_second_rounding(spec: ModelSpec) -> None:
    """4 bits of 4 bits talk nonsense (SmolLM2's perplexity goes from 10.1 to 13.5); 8 bits do not."""
    blocks = (read_manifest(spec.path) or {}).get("blocks", {})
    few_bits = [name for name in blocks if name.startswith(("Q2", "Q3", "Q4", "Q5", "IQ"))]
    if spec.quantize == "q4" and few_bits:
        log.warning(
            "%s came from a file of %s blocks: rounding them to 4 bits again costs much quality; q8 does not",
            spec.served_name, ", ".join(sorted(few_bits)),
        )  # fmt: skip


def _cast_to_float32(model: Any) -> None:
    """Make all floating-point parameters float32, lazily: the only type a Linux processor is fast in."""
    import mlx.core as mx
    from mlx.utils import tree_map

    def cast(value: Any) -> Any:
        return value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value

    model.update(tree_map(cast, model.parameters()))


def _parameters(model: Any) -> list[tuple[str, Any]]:
    from mlx.utils import tree_flatten

    parameters: list[tuple[str, Any]] = tree_flatten(model.parameters())
    return parameters


def _embedding_rows(model: Any, config: dict[str, Any]) -> int:
    """Rows of the token embedding, which bound every token id."""
    rows = [int(value.shape[0]) for name, value in _parameters(model) if _is_embedding(name)]
    if rows:
        return min(rows)
    claimed = config.get("vocab_size", _text_config(config).get("vocab_size"))
    if not isinstance(claimed, int):
        raise InvalidModel("config.json names no vocab_size. Download the model again.")
    return claimed


def _is_embedding(parameter: str) -> bool:
    path = parameter.split(".")
    return path[-1] == "weight" and len(path) > 1 and path[-2] in EMBEDDINGS


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a multimodal configuration that is about text; the whole one otherwise."""
    text_config = config.get("text_config")
    return text_config if isinstance(text_config, dict) else config


def _context_length(config: dict[str, Any], tokenizer: Any) -> int | None:
    for part in (_text_config(config), config):
        for key in CONTEXT_KEYS:
            if isinstance(part.get(key), int) and part[key] > 0:
                return int(part[key])
    limit = getattr(tokenizer, "model_max_length", None)
    return limit if isinstance(limit, int) and 0 < limit < NO_LIMIT_TOKENS else None


def _configured_eos_ids(spec: ModelSpec) -> list[int]:
    """End ids of `config.json` and `generation_config.json` together."""
    config = read_json(spec.path / "config.json")
    generation = spec.path / "generation_config.json"
    sources = [config, _text_config(config), *([read_json(generation)] if generation.exists() else [])]
    found: list[int] = []
    for source in sources:
        ids = source.get("eos_token_id")
        found += [i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int]
    return sorted(set(found))


def _eos_ids(spec: ModelSpec, tokenizer: Any, vocabulary: int) -> frozenset[int]:
    ids = {*_configured_eos_ids(spec), *tokenizer.eos_token_ids}
    return frozenset(i for i in ids if 0 <= i < vocabulary)


def _warn_of_larger_tokenizer(tokenizer: Any, vocabulary: int, spec: ModelSpec) -> None:
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= vocabulary:
        log.warning(
            "%s: the tokenizer knows ids up to %d, the model only %d; texts with such tokens are refused",
            spec.served_name, largest, vocabulary - 1,
        )  # fmt: skip
