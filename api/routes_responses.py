"""`POST /v1/responses`, and `GET` and `DELETE /v1/responses/{id}`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from ..runtime.events import Finished, ReasoningDelta, TextDelta, ToolCallDelta
from .body import read_body
from .context import CONTEXT
from .errors import NOT_FOUND, ApiError, ended_early
from .middleware import KEY_NAME
from .respond import new_id, respond, serving
from .responses import assistant_message, empty_response, responses_generation
from .responses_stream import ResponsesEncoder
from .sse import EARLY_ENDS, StreamHead
from .wire.decode import RESPONSES, decode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..runtime.events import Event
    from ..runtime.generation import Choice, Completion, Generation
    from ..runtime.service import Service
    from .response_store import Stored
    from .wire.responses import Response, ResponsesRequest


async def responses(request: web.Request) -> web.StreamResponse:
    """Answer, and keep the answer to go on from unless `store` is false."""
    context = request.app[CONTEXT]
    context.require_ready()
    fields: ResponsesRequest = decode(RESPONSES, await read_body(request, context.settings))
    earlier = _stored(request, fields.previous_response_id).messages if fields.previous_response_id else ()
    answer_id = new_id("resp").replace("-", "_")
    generation = responses_generation(fields, context.settings, answer_id, earlier)
    async with serving(
        request, context, fields.model, answer_id, [generation.request_id], generation.timeout_s
    ) as service:
        return await _answered(request, fields, generation, service)


async def _answered(
    request: web.Request, fields: ResponsesRequest, generation: Generation, service: Service
) -> web.StreamResponse:
    context = request.app[CONTEXT]
    answer_id, model = generation.request_id, service.model
    created = int(time.time())
    response = empty_response(fields, generation, answer_id, model.name, created)
    owner = request[KEY_NAME]
    given = (generation.messages or ())[1 if fields.instructions else 0 :]

    def keep(done: Response) -> None:
        if done.store:
            messages = (*given, assistant_message(done.output))
            context.responses.put(done.id, owner, messages, msgspec.json.encode(done))

    encoder = ResponsesEncoder(response, keep)

    def answer(_: StreamHead, completions: Sequence[Completion], __: object) -> Response:
        choice = completions[0].choices[0]
        if choice.finish_reason in EARLY_ENDS:
            raise ended_early(choice.finish_reason)
        encoder.encode(_events_of(choice))
        return response

    head = StreamHead(id=answer_id, created=created, model=model.name, fingerprint=context.fingerprint(model))
    stream = bool(fields.stream)
    return await respond(
        request, context, service, head, [generation], stream=stream, encoder=lambda *_: encoder, answer=answer
    )


async def show_response(request: web.Request) -> web.Response:
    """An answer that is kept."""
    return web.Response(body=_stored(request, request.match_info["id"]).body, content_type="application/json")


async def delete_response(request: web.Request) -> web.Response:
    """Forget an answer."""
    name = request.match_info["id"]
    if not request.app[CONTEXT].responses.delete(name, request[KEY_NAME]):
        raise _missing(name)
    return web.json_response({"id": name, "object": "response", "deleted": True})


def _stored(request: web.Request, name: str) -> Stored:
    found = request.app[CONTEXT].responses.get(name, request[KEY_NAME])
    if found is None:
        raise _missing(name)
    return found


def _missing(name: str) -> ApiError:
    message = f"No response {name[:200]!r} is kept here"
    return ApiError(message, status=404, kind=NOT_FOUND, code="response_not_found", param="previous_response_id")


def _events_of(choice: Choice) -> list[Event]:
    """A whole choice as the events it would have been."""
    events: list[Event] = []
    if choice.reasoning:
        events.append(ReasoningDelta(choice.reasoning))
    if choice.text:
        events.append(TextDelta(choice.text, ()))
    events += (ToolCallDelta(place, call.id, call.name, call.arguments) for place, call in enumerate(choice.tool_calls))
    return [*events, Finished(choice.finish_reason, choice.usage)]
