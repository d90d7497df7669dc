"""What commands share: the invocation, sampling flags, and the text of one answer."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ...runtime.errors import TroupeError
from ...runtime.events import Failed, Finished, TextDelta
from ...runtime.generation import Generation
from ...runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Mapping

    from ...runtime.service import Service
    from ..layers import Settings
    from ..runtime_access import OpenRemote, OpenRuntime


class Command(Protocol):
    """What each command's module offers."""

    NAME: str
    HELP: str

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Describe the command to argparse."""
        ...

    def run(self, invocation: Invocation) -> int:
        """Do it; returns the exit code."""
        ...


OK, FAILURE, USAGE, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class Invocation:
    """One run of the command line.

    Attributes:
        arguments: as argparse read them.
        settings: in force.
        open_runtime: makes the runtime; tests bring a fake one.
        open_remote: makes one in a process of its own; None where there is only the fake one.
        environment: of the process.
    """

    arguments: argparse.Namespace
    settings: Settings
    open_runtime: OpenRuntime
    environment: Mapping[str, str] = field(default_factory=dict)
    open_remote: OpenRemote | None = None


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Flags for how an answer is drawn."""
    group = parser.add_argument_group("answer")
    group.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: the rest of the context)")
    group.add_argument("--temperature", type=float, metavar="X", help="0 always takes the likeliest token (default: 1)")
    group.add_argument("--top-p", type=float, metavar="X", help="keep the likeliest tokens of this share (default: 1)")
    group.add_argument("--top-k", type=int, metavar="N", help="keep the N likeliest tokens (default: all)")
    group.add_argument("--min-p", type=float, metavar="X", help="drop tokens below this share of the likeliest one's")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1, makes repetition less likely")
    group.add_argument("--seed", type=int, metavar="N", help="the same answer every time")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given repeatedly")
    group.add_argument("--system", metavar="TEXT", help="instructions that stand before the conversation")


def request_of(arguments: argparse.Namespace) -> Generation:
    """A Generation with the sampling flags and no prompt yet."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return Generation(
        sampling=SamplingParams(**given),
        max_tokens=arguments.max_tokens,
        stop=tuple(arguments.stop or ()),
        request_id=f"cli-{secrets.token_hex(4)}",
    )


def opening_messages(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The conversation before its first turn."""
    return [{"role": "system", "content": arguments.system}] if arguments.system else []


async def answer(service: Service, generation: Generation) -> AsyncIterator[str]:
    """Pieces of the one choice's text. Raises TroupeError when it fails; leaving early cancels it."""
    async with service.stream(generation) as source:
        while events := await source.take():
            text = "".join(event.text for event in events if isinstance(event, TextDelta))
            if text:
                yield text
            for event in events:
                if isinstance(event, Failed):
                    raise TroupeError(event.message, param=event.param, code=event.code)
                if isinstance(event, Finished) and event.reason == "timeout":
                    raise TroupeError("the answer took too long", code="timeout")
