"""`GET /v1/models`."""

from __future__ import annotations

import msgspec


class ModelCard(msgspec.Struct, kw_only=True):
    """One served model. What follows `owned_by` is not OpenAI's.

    Attributes:
        created: Unix seconds when it was loaded; 0 while it never was.
        context_length: most tokens of prompt and output together; unset until it has been loaded once.
        state: "ready", "loading", "idle" (loaded when asked for), "unloading" or "failed".
        detail: why, or how far, in words.
        progress: share of the load that is done, 0 to 1.
        aliases: other names for it.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "mlx-troupe"
    context_length: int | msgspec.UnsetType = msgspec.UNSET
    state: str = "ready"
    detail: str | msgspec.UnsetType = msgspec.UNSET
    progress: float | msgspec.UnsetType = msgspec.UNSET
    aliases: tuple[str, ...] = ()


class ModelList(msgspec.Struct, kw_only=True):
    """All served models."""

    object: str = "list"
    data: list[ModelCard]
