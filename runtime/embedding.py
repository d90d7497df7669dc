"""Embeddings: each input is a prompt that is computed and not continued, in chunks among everybody's others."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

import numpy as np

from .errors import ContextLengthExceeded, InvalidRequest, RequestTimedOut
from .generation import Embeddings, Generation
from .sampling_params import check_token_ids

if TYPE_CHECKING:
    from .generation import EmbeddingQuery
    from .reading import Pooling
    from .service import Service

AT_ONCE = 16
"""Inputs of one query that are queued or at work at a time: the queue has places for others too."""


async def embed(service: Service, query: EmbeddingQuery, pooling: Pooling) -> Embeddings:
    """The vectors of a query. All inputs are checked before any work; the first error after that ends all of it.

    Args:
        service: computes the prompts.
        query: what for.
        pooling: how, unless the query says.

    Raises:
        InvalidRequest: no inputs, an empty or too long one, or more dimensions than there are.
        TroupeError: what `Service.complete` raises; RequestTimedOut, RequestCancelled.
    """
    name = query.request_id or uuid.uuid4().hex
    places = asyncio.Semaphore(AT_ONCE)

    async def one(place: int, prompt: tuple[int, ...]) -> bytes:
        generation = Generation(
            tokens=prompt,
            embed=query.pooling or pooling,
            max_tokens=0,
            cache=False,
            priority=query.priority,
            request_id=f"{name}-{place}",
        )
        async with places:
            completion = await service.complete(generation)
        return unit(completion.choices[0].embedding, query.dimensions)

    try:
        async with asyncio.timeout(query.timeout_s):
            prompts = await _prompts(service, query)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(place, prompt)) for place, prompt in enumerate(prompts)]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    except TimeoutError:
        raise RequestTimedOut("the request's time was over before all inputs were embedded") from None
    return Embeddings(tuple(task.result() for task in tasks), sum(map(len, prompts)))


async def _prompts(service: Service, query: EmbeddingQuery) -> list[tuple[int, ...]]:
    if not query.inputs:
        raise InvalidRequest("there is nothing to embed", param="input")
    most = service.model.context_length
    found = []
    for place, given in enumerate(query.inputs):
        prompt = tuple(await service.tokenize(given)) if isinstance(given, str) else given
        if not prompt:
            raise InvalidRequest(f"input {place} has no tokens", param="input")
        check_token_ids(prompt, service.model.vocab_size, "input")
        if len(prompt) > most:
            text = f"input {place} has {len(prompt)} tokens; this model's context is {most}"
            raise ContextLengthExceeded(text, param="input")
        found.append(prompt)
    return found


def unit(vector: bytes, dimensions: int | None) -> bytes:
    """The first `dimensions` numbers of a native float32 vector, at length 1, as little-endian float32.

    Raises:
        InvalidRequest: the vector has fewer.
    """
    numbers = np.frombuffer(vector, np.float32).astype(np.float64)
    if dimensions is not None and dimensions > len(numbers):
        raise InvalidRequest(f"this model's embeddings have {len(numbers)} dimensions", param="dimensions")
    kept = numbers[:dimensions]
    length = float(np.linalg.norm(kept))
    return (kept / length if length > 0 else kept).astype("<f4").tobytes()
