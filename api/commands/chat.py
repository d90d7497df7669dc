"""`mlx-troupe chat`: a conversation in the terminal.

The main thread reads lines and prints answers, as `input` and Ctrl-C need; the runtime has its event loop in a second
thread, behind a portal. Ctrl-C during an answer ends the answer; what was said of it stays in the conversation.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec

from ...runtime.errors import ContextLengthExceeded, TroupeError
from ..flags import add_model, add_settings
from ..terminal import note, progress_bar
from .common import INTERRUPTED, OK, Invocation, add_sampling, answer, opening_messages, request_of

if TYPE_CHECKING:
    import argparse

    from anyio.from_thread import BlockingPortal

    from ...runtime.generation import Generation
    from ...runtime.service import Service

NAME = "chat"
HELP = "talk to a model in the terminal"
GREETING = "{model}: /reset forgets the conversation, /quit leaves, Ctrl-C ends an answer"


def add(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    add_model(parser)
    add_sampling(parser)
    add_settings(parser, ("runtime",), extra=("log_level",))


def run(invocation: Invocation) -> int:
    """Talk until /quit or the end of input."""
    from anyio.from_thread import start_blocking_portal

    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 - gives `input` its line editing
    bar = progress_bar()
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        runtime = invocation.open_runtime(invocation.settings.runtime, bar)
        service = stack.enter_context(portal.wrap_async_context_manager(runtime))
        if bar is not None:
            bar.close()
        note(GREETING.format(model=service.model.name))
        conversation = Conversation(portal, service, invocation.arguments)
        return _talk(conversation)


def _talk(conversation: Conversation) -> int:
    prompt = "> " if sys.stdin.isatty() else ""
    interrupts = 0
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return OK
        except KeyboardInterrupt:
            interrupts += 1
            if interrupts == 2:
                return INTERRUPTED
            note("\n(/quit leaves, or Ctrl-C again)")
            continue
        interrupts = 0
        if line in ("/quit", "/exit"):
            return OK
        if line == "/reset":
            conversation.reset()
            note("(a new conversation)")
        elif line.startswith("/") and " " not in line:
            note("(there are /reset and /quit)")
        elif line:
            conversation.say(line)


class Conversation:
    """What has been said, and the asking for more. Owned by the main thread."""

    def __init__(self, portal: BlockingPortal, service: Service, arguments: argparse.Namespace) -> None:
        self._portal = portal
        self._service = service
        self._arguments = arguments
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        """Forget all but the system's instructions."""
        self.messages = opening_messages(self._arguments)

    def say(self, text: str) -> None:
        """Take the user's turn and print the assistant's. A turn that fails is forgotten."""
        self.messages.append({"role": "user", "content": text})
        generation = msgspec.structs.replace(request_of(self._arguments), messages=tuple(self.messages))
        said: list[str] = []
        try:
            self._print_answer(generation, said)
        except KeyboardInterrupt:
            note("\n(ended)")
        except TroupeError as error:
            note(f"\nerror: {error}" if said else f"error: {error}")
            if isinstance(error, ContextLengthExceeded):
                note("(/reset makes room)")
        if said:
            self.messages.append({"role": "assistant", "content": "".join(said)})
        else:
            self.messages.pop()

    def _print_answer(self, generation: Generation, said: list[str]) -> None:
        pieces: SimpleQueue[str | None] = SimpleQueue()
        future = self._portal.start_task_soon(_feed, self._service, generation, pieces)
        try:
            while (piece := pieces.get()) is not None:
                said.append(piece)
                print(piece, end="", flush=True)
        finally:
            future.cancel()
        print(flush=True)
        future.result()


async def _feed(service: Service, generation: Generation, pieces: SimpleQueue[str | None]) -> None:
    try:
        async for piece in answer(service, generation):
            pieces.put(piece)
    finally:
        pieces.put(None)
