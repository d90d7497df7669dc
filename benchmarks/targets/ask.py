"""One request to a target and what comes of it, whatever the target is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ..prompts import Endpoint

if TYPE_CHECKING:
    from ..sse import StreamRecord


class Ask(msgspec.Struct, frozen=True):
    """One request.

    Attributes:
        messages: the conversation so far.
        max_tokens: of the answer.
        fields: sampling and other fields of the body.
        leave_after: pieces after which the client disconnects; None stays.
        endpoint: which route of an HTTP server; "completions" joins the messages' texts.
        timeout_s: after which the client gives up.
    """

    messages: tuple[dict[str, Any], ...]
    max_tokens: int
    fields: dict[str, Any]
    leave_after: int | None = None
    endpoint: Endpoint = "chat"
    timeout_s: float = 300.0


class Answer(Protocol):
    """What came back; decoded when `record` is first called, so that the client works little while the clock matters.

    Attributes:
        left: the client disconnected before the end, as it was told to.
        held_bytes: raw bytes waiting to be decoded.
    """

    left: bool
    held_bytes: int

    def record(self) -> StreamRecord:
        """The decoded answer; times on the loop's clock."""
        ...


class Target(Protocol):
    """A server, or the runtime in this process.

    Attributes:
        name: how reports name it.
        in_process: whether it shares this interpreter.
    """

    name: str
    in_process: bool

    async def prepare(self, connections: int) -> None:
        """Open what the first requests need, so that the clock does not measure a short accept backlog."""
        ...

    async def ask(self, ask: Ask) -> Answer:
        """Send a request and read it to its end. Never raises for what the target does."""
        ...

    def received(self) -> int:
        """Pieces of answers that have arrived so far, for the progress line."""
        ...

    async def scrape(self) -> dict[str, float]:
        """The target's own metrics by name; empty where it has none."""
        ...


def joined_text(ask: Ask) -> str:
    """The messages as one prompt, for what has no chat."""
    return "\n".join(str(message.get("content", "")) for message in ask.messages)
