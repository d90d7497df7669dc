"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .answers import chat_answer
from .body import read_body
from .context import CONTEXT
from .respond import head_of, new_id, respond, serving
from .sse import ChatChunkEncoder
from .translate import chat_generation
from .wire.decode import CHAT, decode

if TYPE_CHECKING:
    from aiohttp import web


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat."""
    context = request.app[CONTEXT]
    context.require_ready()
    chat = decode(CHAT, await read_body(request, context.settings))
    answer_id = new_id("chatcmpl")
    generation = chat_generation(chat, context.settings, answer_id)
    async with serving(
        request, context, chat.model, answer_id, [generation.request_id], generation.timeout_s
    ) as service:
        return await respond(
            request,
            context,
            service,
            head_of(context, chat, service.model, [generation], answer_id),
            [generation],
            stream=bool(chat.stream),
            encoder=ChatChunkEncoder,
            answer=chat_answer,
        )
