"""`POST /v1/completions`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .answers import completion_answer
from .body import read_body
from .context import CONTEXT
from .middleware import REQUEST_ID
from .respond import head_of, new_id, respond
from .sse import CompletionChunkEncoder
from .translate import completion_generations
from .wire.decode import COMPLETION, decode

if TYPE_CHECKING:
    from aiohttp import web


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one prompt, or each of several."""
    context = request.app[CONTEXT]
    context.require_ready()
    completion = decode(COMPLETION, await read_body(request, context.settings))
    model = context.model(completion.model, request[REQUEST_ID])
    answer_id = new_id("cmpl")
    generations = completion_generations(completion, context.settings, answer_id)
    return await respond(
        request,
        context,
        head_of(context, completion, model, generations, answer_id),
        generations,
        stream=bool(completion.stream),
        encoder=CompletionChunkEncoder,
        answer=completion_answer,
    )
