"""Starts the servers under comparison, each the same way, and stops each by its own process id.

Every server gets a throw-away HOME (some keep a prefix cache there), no hub, and the same BLAS.
Peers live in virtual environments of their own under one folder, named as in `RECIPES`.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from . import blas
from .http_stream import Target

if TYPE_CHECKING:
    from types import TracebackType

STOP_GRACE_S = 20.0
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to start a server and how to address it.

    `command` and `model_name` may hold {model}, {port}, {peers} and {bin} (the folder of the running
    interpreter).
    """

    name: str
    command: str
    health: str = "/health"
    model_name: str = "{model}"


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("troupe", "{bin}/mlx-troupe serve {model} --host 127.0.0.1 --port {port}", "/readyz"),
        *(
            Recipe(
                f"troupe-{name}",
                f"{{bin}}/mlx-troupe serve {{model}} --host 127.0.0.1 --port {{port}} --api-process {setting}",
                "/readyz",
            )
            for name, setting in (("front", "on"), ("one", "off"))
        ),
        Recipe(
            "mlxlm",
            "{peers}/mlxlm/bin/python -m mlx_lm server --model {model} --host 127.0.0.1 --port {port}",
            model_name="default_model",
        ),
        Recipe(
            "vllm",
            "{peers}/vllm/bin/vllm-mlx serve {model} --host 127.0.0.1 --port {port} --continuous-batching",
        ),
        Recipe("rapid", "{peers}/rapid/bin/rapid-mlx serve {model} --host 127.0.0.1 --port {port}"),
    )
}


@dataclass(frozen=True, slots=True)
class Site:
    """What all servers of one comparison share."""

    model: Path | str
    peers: Path | None
    logs: Path
    library: str | None = blas.OPENBLAS
    fresh_home: bool = True


class Server:
    """A server process and its throw-away HOME; a context manager that stops it."""

    def __init__(self, recipe: Recipe, site: Site) -> None:
        if "{peers}" in recipe.command and site.peers is None:
            raise ValueError(f"server {recipe.name} needs --peers, the folder of the peers' environments")
        self.recipe = recipe
        self.log = site.logs / f"{recipe.name}.log"
        self._home = tempfile.TemporaryDirectory(prefix=f"{recipe.name}-home-", ignore_cleanup_errors=True)
        port = _free_port()
        values = {
            "model": str(site.model),
            "port": str(port),
            "peers": str(site.peers),
            "bin": str(Path(sys.executable).parent),
        }
        self.target = Target("127.0.0.1", port, recipe.model_name.format(**values))
        command = [_filled(part, values) for part in shlex.split(recipe.command)]
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment(site)
                )
        except OSError:
            self._home.cleanup()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def healthy(self, timeout_s: float) -> None:
        """Wait until the health URL answers 200. Raises RuntimeError with the log's end if it never does."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._answers():
                    self.check_alive()
                    await asyncio.sleep(POLL_S)
        except (TimeoutError, RuntimeError) as error:
            tail = self.log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{self.recipe.name} is not healthy: {error}\n{tail}") from error

    def check_alive(self) -> None:
        """Raise RuntimeError when the process has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"{self.recipe.name} exited with {self._process.returncode}")

    def resident_bytes(self) -> float:
        """Memory of the process and its children. Raises OSError when it has ended."""
        try:
            root = psutil.Process(self._process.pid)
            return float(sum(one.memory_info().rss for one in (root, *root.children(recursive=True))))
        except psutil.Error as error:
            raise OSError(f"{self.recipe.name} has ended") from error

    def cpu_s(self) -> float:
        """Processor seconds the server has used; 0 where /proc is missing."""
        stat = Path(f"/proc/{self._process.pid}/stat")
        if not stat.exists():
            return 0.0
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """Ask the process to end, then end it; remove its HOME."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._home.cleanup()

    def _environment(self, site: Site) -> dict[str, str]:
        private: dict[str, str] = {}
        if site.fresh_home:
            home = self._home.name
            private = {
                "HOME": home,
                "XDG_CACHE_HOME": f"{home}/.cache",
                "HF_HOME": f"{home}/.hf",
                "HF_HUB_OFFLINE": "1",
            }
        return {**os.environ, **private, **blas.environment(site.library)}

    async def _answers(self) -> bool:
        request = f"GET {self.recipe.health} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        try:
            reader, writer = await asyncio.open_connection(self.target.host, self.target.port)
            writer.write(request.encode())
            status = await reader.readline()
            writer.close()
        except OSError:
            return False
        return b" 200" in status


def custom_recipe(text: str) -> Recipe:
    """`NAME=COMMAND`, with the placeholders of `Recipe`. Raises ValueError."""
    name, separator, command = text.partition("=")
    if not separator or "{port}" not in command:
        raise ValueError(f"--server takes NAME=COMMAND with {{port}} in the command, not {text!r}")
    return Recipe(name, command)


def _filled(text: str, values: dict[str, str]) -> str:
    """`text` with its placeholders; other braces, as in JSON, stay."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
