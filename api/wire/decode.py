"""From bytes to a request, with errors that name the field."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from ..errors import ApiError, invalid
from .chat import ChatRequest
from .completions import CompletionRequest
from .embeddings import EmbeddingRequest
from .fields import HARMLESS, RefusedFields
from .messages import MessagesRequest
from .responses import ResponsesRequest
from .text import DetokenizeRequest, TokenizeRequest

Request = TypeVar("Request")

CHAT = msgspec.json.Decoder(ChatRequest)
COMPLETION = msgspec.json.Decoder(CompletionRequest)
EMBEDDINGS = msgspec.json.Decoder(EmbeddingRequest)
RESPONSES = msgspec.json.Decoder(ResponsesRequest)
TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)
MESSAGES = msgspec.json.Decoder(MessagesRequest)

_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")


def decode(decoder: msgspec.json.Decoder[Request], body: bytes) -> Request:
    """A checked request. Raises ApiError (400) for text that is not JSON and for fields of a wrong type."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise invalid("The body is nested too deeply", code="invalid_json") from None


def refuse_unsupported(request: RefusedFields) -> None:
    """Raise ApiError (400) if a field asks for something that is not done: silence would look like success."""
    for name in RefusedFields.__struct_fields__:
        value = getattr(request, name)
        if value is not None and not any(_same(value, harmless) for harmless in HARMLESS.get(name, ())):
            raise unsupported(name)


def unsupported(param: str, hint: str = "") -> ApiError:
    """The error for a known field that cannot be honoured."""
    message = f"{param} is not supported by this server" + (f": {hint}" if hint else "")
    return invalid(message, param=param, code="unsupported_parameter")


def _same(value: object, harmless: object) -> bool:
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)


def _wrong_type(message: str) -> ApiError:
    place = _PATH.search(message)
    param = place["path"] if place else None
    return invalid(message, param=param or None, code="invalid_type")
