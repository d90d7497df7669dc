"""`POST /v1/completions`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from .answers import completion_answer
from .body import read_body
from .context import CONTEXT
from .respond import head_of, new_id, respond, serving
from .sse import CompletionChunkEncoder
from .translate import completion_generations
from .wire.decode import COMPLETION, decode

if TYPE_CHECKING:
    from aiohttp import web

    from ..runtime.generation import Generation
    from ..runtime.service import Service


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one prompt, or each of several."""
    context = request.app[CONTEXT]
    context.require_ready()
    completion = decode(COMPLETION, await read_body(request, context.settings))
    answer_id = new_id("cmpl")
    generations = completion_generations(completion, context.settings, answer_id)
    ids = [generation.request_id for generation in generations]
    async with serving(request, context, completion.model, answer_id, ids, generations[0].timeout_s) as service:
        head = head_of(context, completion, service.model, generations, answer_id)
        if completion.echo:
            head = msgspec.structs.replace(
                head,
                echo=tuple([await _text_of(generation, service) for generation in generations]),
                echo_logprobs=generations[0].prompt_logprobs is not None,
            )
        return await respond(
            request,
            context,
            service,
            head,
            generations,
            stream=bool(completion.stream),
            encoder=CompletionChunkEncoder,
            answer=completion_answer,
        )


async def _text_of(generation: Generation, service: Service) -> str:
    """The prompt as text, for an echo."""
    if generation.prompt is not None:
        return generation.prompt
    return await service.detokenize(list(generation.tokens or ()))
