"""Quantise a model while it is loaded: `--quantize q4` or `q8`. Runs on the MLX thread."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .spec import Quantize

log = logging.getLogger(__name__)

BITS: dict[Quantize, int] = {"q4": 4, "q8": 8}
GROUP_SIZES = (64, 32)
"""Weights that share a scale: the first that divides a layer's columns is taken."""


def quantise(model: Any, config: dict[str, Any], preset: Quantize) -> dict[str, Any]:
    """Quantise `model` in place, lazily; returns its configuration with what was done.

    A model that already is quantised is left alone, and a line in the log says so. Layers whose columns
    no group size divides stay as they are, as do those that the model's own class exempts.
    """
    import mlx.nn as nn

    if already := describe_quantisation(config):
        log.warning("the model already is quantised (%s): --quantize %s is ignored", already, preset)
        return config
    chosen: dict[str, dict[str, int]] = {}
    exempt = getattr(model, "quant_predicate", None)

    def choose(path: str, module: Any) -> bool | dict[str, int]:
        parameters = _parameters(path, module, exempt, BITS[preset])
        if parameters is None:
            return False
        chosen[path] = parameters
        return parameters

    nn.quantize(model, group_size=GROUP_SIZES[0], bits=BITS[preset], class_predicate=choose)
    log.info("quantised %d layers to %s", len(chosen), preset)
    default = {"group_size": GROUP_SIZES[0], "bits": BITS[preset]}
    others = {path: parameters for path, parameters in chosen.items() if parameters != default}
    return config | {"quantization": default | others}


def describe_quantisation(config: dict[str, Any]) -> str:
    """How a model is quantised, in words; empty when it is not."""
    text_config = config.get("text_config")
    nested = text_config if isinstance(text_config, dict) else {}
    for part in (config, nested):
        for key in ("quantization", "quantization_config"):
            settings = part.get(key)
            if isinstance(settings, dict) and settings:
                return _describe(settings)
    return ""


def _describe(settings: dict[str, Any]) -> str:
    if "bits" in settings:
        return f"{settings['bits']} bits, groups of {settings.get('group_size', '?')}"
    return str(settings.get("quant_method", "unknown method"))


def _parameters(path: str, module: Any, exempt: Any, bits: int) -> dict[str, int] | None:
    """Bits and group size of a layer; None leaves it alone."""
    if not hasattr(module, "to_quantized"):
        return None
    columns = module.weight.shape[-1]
    group_size = next((size for size in GROUP_SIZES if columns % size == 0), None)
    wish = exempt(path, module) if exempt is not None else True
    if group_size is None or not wish:
        return None
    if isinstance(wish, dict):
        bits = wish.get("bits", bits)
        group_size = wish["group_size"] if columns % wish.get("group_size", columns + 1) == 0 else group_size
    return {"group_size": group_size, "bits": bits}
