"""`POST /v1/embeddings`."""

from __future__ import annotations

import base64
import struct
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from ..runtime.generation import EmbeddingQuery
from .body import read_body
from .checks import prompts, real, whole
from .context import CONTEXT
from .errors import invalid
from .respond import new_id, serving
from .translate import MAX_PRIORITY, MAX_TIMEOUT_S
from .wire.decode import EMBEDDINGS, decode
from .wire.embeddings import Embedding, EmbeddingList, EmbeddingUsage

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..runtime.reading import Pooling
    from .settings import ServerSettings
    from .wire.embeddings import EmbeddingRequest

MAX_DIMENSIONS = 1 << 20
_POOLINGS: dict[str, Pooling | None] = {"mean": "mean", "last": "last", "auto": None}


async def embeddings(request: web.Request) -> web.Response:
    """Vectors of texts."""
    context = request.app[CONTEXT]
    context.require_ready()
    fields: EmbeddingRequest = decode(EMBEDDINGS, await read_body(request, context.settings))
    answer_id = new_id("embd")
    query = embedding_query(fields, context.settings, answer_id)
    encode = _encoder(fields.encoding_format)
    inputs = [f"{answer_id}-{place}" for place in range(len(query.inputs))]
    async with serving(request, context, fields.model, answer_id, inputs, query.timeout_s) as service:
        model = service.model
        found = await service.embed(query)
    answer = EmbeddingList(
        data=[Embedding(index=place, embedding=encode(vector)) for place, vector in enumerate(found.vectors)],
        model=model.name,
        usage=EmbeddingUsage(found.prompt_tokens, found.prompt_tokens),
    )
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


def embedding_query(fields: EmbeddingRequest, settings: ServerSettings, request_id: str) -> EmbeddingQuery:
    """What the runtime is asked. Raises ApiError naming the field."""
    inputs = prompts(fields.input, settings.max_embedding_inputs, "input")
    if "" in inputs:
        raise invalid("input holds an empty text", param="input")
    if fields.pooling is not None and fields.pooling not in _POOLINGS:
        raise invalid(f"pooling must be one of {', '.join(_POOLINGS)}", param="pooling")
    timeout_s = real(fields.timeout, "timeout", 0.001, MAX_TIMEOUT_S)
    return EmbeddingQuery(
        inputs=tuple(inputs),
        pooling=_POOLINGS[fields.pooling or "auto"],
        dimensions=whole(fields.dimensions, "dimensions", 1, MAX_DIMENSIONS),
        timeout_s=settings.request_timeout_s if timeout_s is None else timeout_s,
        priority=whole(fields.priority, "priority", -MAX_PRIORITY, MAX_PRIORITY) or 0,
        request_id=request_id,
    )


def _encoder(name: str | None) -> Callable[[bytes], list[float] | str]:
    if name in (None, "float"):
        return _numbers
    if name == "base64":
        return lambda vector: base64.b64encode(vector).decode()
    raise invalid("encoding_format must be float or base64", param="encoding_format")


def _numbers(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))
