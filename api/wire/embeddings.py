"""`POST /v1/embeddings`."""

from __future__ import annotations

import msgspec

from .fields import Number, Prompts


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """Texts, or token ids, to turn into vectors. `pooling` ("mean", "last") and `timeout` are not OpenAI's."""

    model: str | None = None
    input: Prompts | None = None
    encoding_format: str | None = None
    dimensions: Number | None = None
    user: str | None = None
    pooling: str | None = None
    timeout: Number | None = None
    priority: Number | None = None


class Embedding(msgspec.Struct, kw_only=True):
    """One vector of unit length: numbers, or their little-endian float32 in base64."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The answer, in the order of the inputs."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
