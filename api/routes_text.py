"""`POST /tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from ..runtime.errors import InvalidRequest, UnknownModel
from .body import read_body
from .checks import token_ids
from .context import CONTEXT
from .errors import invalid
from .wire.decode import DETOKENIZE, TOKENIZE, decode
from .wire.text import DetokenizeAnswer, TokenizeAnswer

if TYPE_CHECKING:
    from .wire.text import DetokenizeRequest, TokenizeRequest


async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a text."""
    context = request.app[CONTEXT]
    context.require_ready()
    fields: TokenizeRequest = decode(TOKENIZE, await read_body(request, context.settings))
    text = fields.prompt if fields.prompt is not None else fields.content
    if text is None:
        raise invalid("prompt is required", param="prompt", code="missing_parameter")
    async with context.models.lease(fields.model or "") as service:
        tokens = await service.tokenize(text, add_special_tokens=fields.add_special_tokens is not False)
        return _json(TokenizeAnswer(tokens, len(tokens), service.model.context_length))


async def detokenize(request: web.Request) -> web.Response:
    """Text of token ids."""
    context = request.app[CONTEXT]
    context.require_ready()
    fields: DetokenizeRequest = decode(DETOKENIZE, await read_body(request, context.settings))
    if fields.tokens is None:
        raise invalid("tokens is required", param="tokens", code="missing_parameter")
    try:
        async with context.models.lease(fields.model or "") as service:
            text = await service.detokenize(list(token_ids(fields.tokens, "tokens")))
    except UnknownModel:
        raise
    except InvalidRequest as error:
        raise invalid(error.message, param="tokens") from None
    return _json(DetokenizeAnswer(text, text))


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
