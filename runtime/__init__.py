"""Mechanism: actors' base, messages, the MLX thread, rows and KV, text, and the embedding facade.

from mlx_troupe.runtime import Generation, Runtime, RuntimeConfig, SamplingParams
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import RuntimeConfig
    from .errors import InvalidRequest, NotReady, Overloaded, TroupeError
    from .events import Failed, Finished, PrefillProgress, TextDelta
    from .facade import Runtime
    from .generation import Choice, Completion, Generation, ModelInfo
    from .pool.pool import ModelPool
    from .pool.settings import PooledModel, PoolSettings
    from .sampling_params import SamplingParams

_HOMES = {
    "Choice": "generation",
    "Completion": "generation",
    "Failed": "events",
    "Finished": "events",
    "Generation": "generation",
    "InvalidRequest": "errors",
    "ModelInfo": "generation",
    "ModelPool": "pool.pool",
    "NotReady": "errors",
    "Overloaded": "errors",
    "PoolSettings": "pool.settings",
    "PooledModel": "pool.settings",
    "PrefillProgress": "events",
    "Runtime": "facade",
    "RuntimeConfig": "config",
    "SamplingParams": "sampling_params",
    "TextDelta": "events",
    "TroupeError": "errors",
}


def __getattr__(name: str) -> object:
    """Import on first use: the facade imports the actors, which import this package's types."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


__all__ = [
    "Choice",
    "Completion",
    "Failed",
    "Finished",
    "Generation",
    "InvalidRequest",
    "ModelInfo",
    "ModelPool",
    "NotReady",
    "Overloaded",
    "PoolSettings",
    "PooledModel",
    "PrefillProgress",
    "Runtime",
    "RuntimeConfig",
    "SamplingParams",
    "TextDelta",
    "TroupeError",
]
