"""The servers of a side-by-side run, from what the command line says of each.

    NAME=URL       one that runs already: mine=http://127.0.0.1:8000
    NAME=COMMAND   started and stopped here: other='some-server --model {model} --port {port}'
    RECIPE         a known one: mlx-troupe, mlx-lm, vllm-mlx, rapid-mlx

Known ones are looked for in `--peers` (one environment each, see README.md here), else on PATH.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from .http_stream import Target as Address
from .servers import Recipe, Server, Site
from .targets.http import HttpTarget

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

HEALTH_PATHS = ("/readyz", "/health", "/v1/models")
POLL_S = 0.25

KNOWN = {
    "mlx-troupe": "mlx-troupe serve {model} --host 127.0.0.1 --port {port}",
    "mlx-lm": "mlx_lm.server --model {model} --host 127.0.0.1 --port {port}",
    "vllm-mlx": "vllm-mlx serve {model} --host 127.0.0.1 --port {port} --continuous-batching",
    "rapid-mlx": "rapid-mlx serve {model} --host 127.0.0.1 --port {port}",
}
PEER_FOLDERS = {"mlx-lm": "mlxlm", "vllm-mlx": "vllm", "rapid-mlx": "rapid", "mlx-troupe": "troupe"}
"""Environment of each in the folder that `--peers` names (see README.md here)."""
MODEL_NAMES = {"mlx-lm": "default_model"}
"""Where /v1/models does not say what to ask for: mlx_lm.server lists what lies in the hub's cache."""


class Contender(msgspec.Struct, frozen=True):
    """One server: `url` of one that runs, or `command` with {port} and perhaps {model}."""

    name: str
    url: str = ""
    command: str = ""


def parse_contender(text: str, peers: Path | None = None) -> Contender:
    """A contender of what `--server` says. Raises ValueError that tells what to write instead."""
    name, separator, what = text.partition("=")
    if not separator:
        return _known(name, peers)
    if what.startswith(("http://", "https://")):
        return Contender(name, url=what)
    if "{port}" not in what:
        raise ValueError(f"--server {name}: neither a URL nor a command with {{port}} in it: {what!r}")
    return Contender(name, command=what)


def _known(name: str, peers: Path | None) -> Contender:
    command = KNOWN.get(name)
    if command is None:
        raise ValueError(f"--server {name}: not NAME=URL or NAME=COMMAND, and known are only {', '.join(KNOWN)}")
    program, _, rest = command.partition(" ")
    places = [Path(sys.executable).parent] if name == "mlx-troupe" else []
    if peers is not None:
        places.insert(0, peers / PEER_FOLDERS[name] / "bin")
    found = next((str(place / program) for place in places if (place / program).exists()), shutil.which(program))
    if found is None:
        raise ValueError(
            f"--server {name}: {program} is not on PATH; install it, give --peers, or {name}='/path/{program} {rest}'"
        )
    return Contender(name, command=f"{shlex.quote(found)} {rest}")


@asynccontextmanager
async def running(
    contenders: Sequence[Contender],
    site: Site,
    *,
    start_timeout_s: float,
    model_names: dict[str, str],
    api_key: str | None = None,
) -> AsyncIterator[list[HttpTarget]]:
    """All servers up and answering; those started here are stopped at the end, each by its own process id.

    Raises RuntimeError, with the end of the log, when one does not get healthy; ValueError when no model name is known.
    """
    async with AsyncExitStack() as stack:
        started = [_start(one, site, stack) for one in contenders]
        targets = []
        for contender, server in zip(contenders, started, strict=True):
            address = Address.from_url(contender.url, "", api_key) if server is None else server.target
            target = HttpTarget(contender.name, address, None if server is None else server.resident_bytes)
            await _healthy(target, server, start_timeout_s)
            name = model_names.get(contender.name) or MODEL_NAMES.get(contender.name) or await first_model(target)
            target.address = replace(address, model=name)
            targets.append(target)
        yield targets


def _start(contender: Contender, site: Site, stack: AsyncExitStack) -> Server | None:
    if contender.url:
        return None
    recipe = Recipe(contender.name, contender.command, model_name="")
    return stack.enter_context(Server(recipe, site))


async def _healthy(target: HttpTarget, server: Server | None, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not await answers(target):
                if server is not None:
                    server.check_alive()
                await asyncio.sleep(POLL_S)
    except (TimeoutError, RuntimeError) as error:
        tail = "" if server is None else "\n" + server.log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{target.name} is not healthy: {error or 'no answer in time'}{tail}") from error


async def answers(target: HttpTarget) -> bool:
    """Whether any of the usual health paths says yes."""
    for path in HEALTH_PATHS:
        status, _ = await target.look(path)
        if status != 404:
            return status == 200
    return False


async def first_model(target: HttpTarget) -> str:
    """The first name that /v1/models lists. Raises ValueError when there is none."""
    names = await target.model_names()
    if not names:
        raise ValueError(f"{target.name} lists no model at /v1/models; say which to ask for with --model-name")
    return names[0]
