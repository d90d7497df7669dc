"""The one way from an accepted request to its answer, whole or streamed, for every protocol."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from .errors import CLIENT_CLOSED_REQUEST, as_api_error, ended_early
from .middleware import ERROR_CODE, KEY_NAME, REQUEST_ID, SPAN, STAGE, STATUS
from .sources import completions_of, events_of
from .sse import StreamHead
from .streaming import send_whole, stream_events
from .traced_writer import make_writer
from .tracing import Watched
from .wire.chat import ChatRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from ..runtime.generation import Completion, Generation, ModelInfo
    from ..runtime.service import Service
    from .context import ApiContext
    from .encoding import StreamEncoder
    from .logprobs import TokenText
    from .wire.fields import RequestFields

    Encoder = Callable[[StreamHead, TokenText], StreamEncoder]
    Answer = Callable[[StreamHead, Sequence[Completion], TokenText], Any]


def new_id(prefix: str) -> str:
    """An answer's id, which is also the runtime's request id."""
    return f"{prefix}-{uuid.uuid4().hex}"


@asynccontextmanager
async def serving(
    request: web.Request,
    context: ApiContext,
    model: str | None,
    answer_id: str,
    request_ids: Sequence[str],
    timeout_s: float | None,
) -> AsyncIterator[Service]:
    """The service of the model that a request names, held while the block runs.

    `cancel` knows the work of the block, and the wait for a model that is loaded for it, by the answer's id and the
    request's. Raises what `ModelDirectory.lease` raises, and ApiError when that wait takes longer than `timeout_s`.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(context.at_work((answer_id, request[REQUEST_ID]), request_ids))
        try:
            async with asyncio.timeout(timeout_s):
                service = await stack.enter_async_context(context.models.lease(model or "", request_ids))
        except TimeoutError:
            raise ended_early("timeout") from None
        except asyncio.CancelledError:
            request[STAGE] = "loading"
            raise
        yield service


async def respond(
    request: web.Request,
    context: ApiContext,
    service: Service,
    head: StreamHead,
    generations: Sequence[Generation],
    *,
    stream: bool,
    encoder: Encoder,
    answer: Answer,
) -> web.StreamResponse:
    """Run the generations and answer, whole or as a stream.

    The client leaving ends the runtime's work: aiohttp cancels this task, which leaves the runtime's block.
    """
    span = request[SPAN]
    span.asked(head.model, head.choices)
    generations = [context.own_prefixes(generation, request[KEY_NAME]) for generation in generations]
    if stream:
        return await _streamed(request, context, service, encoder(head, service.token_text), generations)
    request[STAGE] = "answer"
    completions = await completions_of(service, generations)
    for choice in [choice for completion in completions for choice in completion.choices]:
        span.choice_ended(choice.finish_reason, choice.usage)
    body = answer(head, completions, service.token_text)
    response = web.Response(body=msgspec.json.encode(body), content_type="application/json")
    try:
        await send_whole(request, response, context.settings.write_timeout_s, lambda: _mark_unread(request))
    except ConnectionError:
        request[STATUS] = CLIENT_CLOSED_REQUEST
    return response


def _mark_unread(request: web.Request) -> None:
    request[STAGE] = "unread"


async def _streamed(
    request: web.Request,
    context: ApiContext,
    service: Service,
    encoder: StreamEncoder,
    generations: Sequence[Generation],
) -> web.StreamResponse:
    settings = context.settings
    writer = make_writer(
        getattr(service, "tracer", None),
        request,
        write_timeout_s=settings.write_timeout_s,
        write_buffer_bytes=settings.write_buffer_bytes,
        on_cut=lambda: _mark_unread(request),
    )
    try:
        async with events_of(service, generations) as source:
            encoder.prompt_tokens = getattr(source, "prompt_tokens", 0)
            span = request[SPAN]
            heard = Watched(source, span) if span.records else source
            await stream_events(heard, encoder, writer, settings.keepalive_interval_s)
            request[STATUS] = writer.response.status  # all is sent; the client may leave now
    except ConnectionError:
        request[STATUS] = CLIENT_CLOSED_REQUEST
    except Exception as error:
        if not writer.opened:
            raise
        await writer.fail(encoder.fail(as_api_error(error, request[REQUEST_ID])))
    finally:
        request.setdefault(STAGE, encoder.stage)
    if encoder.error is not None:
        request[ERROR_CODE] = encoder.error.code
        context.metrics.failed(encoder.error.code)
    return writer.response


def head_of(
    context: ApiContext,
    fields: RequestFields,
    model: ModelInfo,
    generations: Sequence[Generation],
    answer_id: str,
) -> StreamHead:
    """What all parts of an answer in OpenAI's shape have in common."""
    options = fields.stream_options
    return StreamHead(
        id=answer_id,
        created=int(time.time()),
        model=model.name,
        fingerprint=context.fingerprint(model),
        choices=sum(generation.n for generation in generations),
        prompts=len(generations),
        include_usage=bool(options and options.include_usage),
        return_progress=bool(fields.return_progress),
        reasoning_fields=_reasoning_fields(fields),
    )


def _reasoning_fields(fields: RequestFields) -> tuple[str, ...]:
    if not isinstance(fields, ChatRequest):
        return ()
    excluded = fields.reasoning is not None and fields.reasoning.exclude is True
    if fields.include_reasoning is False or excluded:
        return ()
    asked = fields.include_reasoning is True or fields.reasoning is not None
    return ("reasoning_content", "reasoning") if asked else ("reasoning_content",)
