"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from .anthropic import message_answer, messages_generation, wants_thoughts
from .anthropic_stream import MessagesEncoder
from .body import read_body
from .context import CONTEXT
from .middleware import REQUEST_ID
from .respond import new_id, respond, serving
from .sse import StreamHead
from .wire.decode import MESSAGES, decode
from .wire.messages import TokenCount

if TYPE_CHECKING:
    from .wire.messages import MessagesRequest


async def messages(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    context = request.app[CONTEXT]
    context.require_ready()
    fields: MessagesRequest = decode(MESSAGES, await read_body(request, context.settings))
    answer_id = new_id("msg").replace("-", "_")
    generation = messages_generation(fields, context.settings, answer_id)
    async with serving(
        request, context, fields.model, answer_id, [generation.request_id], generation.timeout_s
    ) as service:
        head = StreamHead(
            id=answer_id,
            created=int(time.time()),
            model=service.model.name,
            fingerprint=context.fingerprint(service.model),
            reasoning_fields=("thinking",) if wants_thoughts(fields) else (),
        )
        return await respond(
            request,
            context,
            service,
            head,
            [generation],
            stream=bool(fields.stream),
            encoder=MessagesEncoder,
            answer=message_answer,
        )


async def count_tokens(request: web.Request) -> web.Response:
    """How many tokens the prompt of a conversation has."""
    context = request.app[CONTEXT]
    context.require_ready()
    fields: MessagesRequest = decode(MESSAGES, await read_body(request, context.settings))
    generation = messages_generation(fields, context.settings, request[REQUEST_ID], counting=True)
    async with context.models.lease(fields.model or "") as service:
        count = await service.count_tokens(generation)
    return web.Response(body=msgspec.json.encode(TokenCount(count)), content_type="application/json")
