"""`GET /v1/models`."""

from __future__ import annotations

import msgspec


class ModelCard(msgspec.Struct, kw_only=True):
    """One served model. `context_length` is not OpenAI's: most tokens of prompt and output together."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "mlx-troupe"
    context_length: int


class ModelList(msgspec.Struct, kw_only=True):
    """All served models."""

    object: str = "list"
    data: list[ModelCard]
