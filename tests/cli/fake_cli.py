"""The command line over a fake service: in this process, or as one of its own (`python -m tests.cli.fake_cli ...`)."""

import asyncio
import sys
from collections.abc import Callable

from mlx_troupe.api.cli import main
from mlx_troupe.runtime.events import Finished, TextDelta, Usage
from mlx_troupe.runtime.generation import Generation

from ..api.fake_service import FakeService, Script, hello


def last_words(generation: Generation) -> str:
    assert generation.messages is not None
    return generation.messages[-1]["content"]


def slow_or_hello(generation: Generation) -> Script:
    """Never ends when asked to be slow; else says how many messages it was shown."""
    if "slow" in (generation.prompt or last_words(generation)):
        return [TextDelta("Once", (1,)), asyncio.Event()]
    if generation.messages is None:
        return hello(generation)
    return [TextDelta(f"seen {len(generation.messages)}", (1,)), Finished("stop", Usage())]


def loaded(script: Callable[[Generation], Script] = hello) -> FakeService:
    service = FakeService(script, loaded=False)
    service.may_load.set()
    return service


def run(service: FakeService, *arguments: str) -> int:
    return main(arguments, environment={}, open_runtime=lambda config, progress: service)


if __name__ == "__main__":
    sys.exit(run(loaded(slow_or_hello), *sys.argv[1:]))
