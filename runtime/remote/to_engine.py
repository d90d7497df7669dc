"""What the front process says to the engine process. `number` names a call; `model` one of several models, "" the only
one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import msgspec

from ..config import RuntimeConfig
from ..generation import EmbeddingQuery, Generation


def wire_version() -> str:
    """What both ends must agree on: the installed package, which may change under a running server."""
    try:
        return version("mlx-troupe")
    except PackageNotFoundError:
        return "unknown"


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message: load this."""

    version: str
    config: RuntimeConfig


class Open(msgspec.Struct, frozen=True, tag=True):
    """Submit a request. Accepted or Refused answers, and its events follow; all at the end if `whole`."""

    number: int
    generation: Generation
    whole: bool = False
    model: str = ""


class Close(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for that call any more: cancel what it does."""

    number: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End a request by its id, with reason "cancelled"."""

    request_id: str
    model: str = ""


class Embed(msgspec.Struct, frozen=True, tag=True):
    """See `Service.embed`."""

    number: int
    query: EmbeddingQuery
    model: str = ""


class Tokenize(msgspec.Struct, frozen=True, tag=True):
    """See `Service.tokenize`."""

    number: int
    text: str
    add_special_tokens: bool = True
    model: str = ""


class Detokenize(msgspec.Struct, frozen=True, tag=True):
    """See `Service.detokenize`."""

    number: int
    tokens: list[int]
    model: str = ""


class CountTokens(msgspec.Struct, frozen=True, tag=True):
    """See `Service.count_tokens`."""

    number: int
    generation: Generation
    model: str = ""


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    """See `Service.status`."""

    number: int
    model: str = ""


class AskMetrics(msgspec.Struct, frozen=True, tag=True):
    """See `Service.metrics`."""

    number: int
    model: str = ""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """See `Service.drain`."""

    number: int
    timeout_s: float
    model: str = ""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End everything and the process."""


Call = Open | Embed | Tokenize | Detokenize | CountTokens | AskStatus | AskMetrics | Drain
ToEngine = Hello | Call | Close | Cancel | Stop
