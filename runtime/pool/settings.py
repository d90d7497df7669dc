"""What a pool is told: its models, and how it keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..config import Count, RuntimeConfig, Seconds
from ..directory import DEFAULT_MODEL_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a pool.

    Attributes:
        model_ttl_s: a model that nobody has used for so long is unloaded; none keeps it.
        max_loaded_models: most models loaded at once; none leaves that to memory.
        model_wait_s: longest a request waits for its model to be loaded.
        max_model_waits: most requests waiting for models; more are refused.
    """

    model_ttl_s: Seconds | None = None
    max_loaded_models: Count | None = None
    model_wait_s: Seconds = 120.0
    max_model_waits: Count = 256


class PooledModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a pool.

    Attributes:
        name: what clients call it.
        config: of its runtime, `served_name` being `name`.
        aliases: other names for it.
        pin: loaded at the start and never unloaded.
        ttl_s: instead of the pool's.
    """

    name: str
    config: RuntimeConfig
    aliases: tuple[str, ...] = ()
    pin: bool = False
    ttl_s: float | None = None


def model_name(model: str | None) -> str:
    """What a model is called by the operator's word for it: a folder's or file's last part, a hub id as it is."""
    if model is None:
        return "demo"
    path = model.rstrip("/")
    if path.endswith(".gguf"):
        path = path.removesuffix(".gguf")
        return path.rpartition("/")[2]
    local = path.startswith(("/", ".", "~")) or path.count("/") > 1
    return path.rpartition("/")[2] if local else path


def look_up(models: Iterable[PooledModel]) -> dict[str, int]:
    """Each name that a request may bring, and the place of its model; names go before the operator's own words.

    Raises ValueError when two models would answer to one name.
    """
    models = list(models)
    found: dict[str, int] = {}
    for place, model in enumerate(models):
        for name in (model.name, *model.aliases):
            if name in DEFAULT_MODEL_NAMES:
                raise ValueError(f"{name!r} names the first model, so no model can be called that")
            if found.setdefault(name, place) != place:
                raise ValueError(f"two models are called {name!r}; give one of them another name")
    for place, model in enumerate(models):
        if model.config.model is not None:
            found.setdefault(model.config.model, place)
    return found | dict.fromkeys(DEFAULT_MODEL_NAMES, 0)
