"""`mlx-troupe generate`: one prompt, one answer."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import msgspec

from ..flags import add_model, add_settings
from ..options import SettingsError
from ..terminal import progress_bar
from .common import OK, Invocation, add_sampling, answer, opening_messages, request_of

if TYPE_CHECKING:
    import argparse

    from ...runtime.generation import Completion, Generation
    from ...runtime.service import Service

NAME = "generate"
HELP = "complete one prompt, given by --prompt or on stdin"


def add(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    add_model(parser)
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; - or none reads stdin")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it stands, without a chat template")
    parser.add_argument("--json", action="store_true", help="print the whole answer as one JSON object")
    add_sampling(parser)
    add_settings(parser, ("runtime",), extra=("log_level",))


def run(invocation: Invocation) -> int:
    """Print the answer to stdout as it comes."""
    prompt = invocation.arguments.prompt
    if prompt in (None, "-"):
        if sys.stdin.isatty() and prompt is None:
            raise SettingsError("no prompt: give one with --prompt, or on stdin")
        prompt = sys.stdin.read()
    asyncio.run(_generate(invocation, prompt))
    return OK


async def _generate(invocation: Invocation, prompt: str) -> None:
    arguments = invocation.arguments
    bar = progress_bar()
    async with invocation.open_runtime(invocation.settings.runtime, bar) as service:
        if bar is not None:
            bar.close()
        generation = request_of(arguments)
        if arguments.raw or not service.model.has_chat_template:
            generation = msgspec.structs.replace(generation, prompt=prompt)
        else:
            messages = (*opening_messages(arguments), {"role": "user", "content": prompt})
            generation = msgspec.structs.replace(generation, messages=messages)
        if arguments.json:
            print(_json(await service.complete(generation)))
        else:
            await _print_answer(service, generation)


async def _print_answer(service: Service, generation: Generation) -> None:
    text = ""
    async for text in answer(service, generation):
        print(text, end="", flush=True)
    if not text.endswith("\n"):
        print(flush=True)


def _json(completion: Completion) -> str:
    choice = completion.choices[0]
    found = {
        "model": completion.model,
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "usage": completion.usage,
    }
    return msgspec.json.encode(found).decode()
