"""`mlx-troupe serve`: the OpenAI API over HTTP."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ...runtime.errors import TroupeError
from ..event_loop import loop_factory
from ..flags import add_model, add_settings
from ..keys import load_keys
from ..options import SettingsError
from ..processors import processors
from ..runtime_access import open_pool
from ..terminal import note, progress_bar
from ..tracing import NO_TRACING, Tracing, tracing_to_collector
from .common import FAILURE, INTERRUPTED, OK, Invocation

if TYPE_CHECKING:
    import argparse

    from ...runtime.config import RuntimeConfig
    from ..keys import ApiKeys
    from ..server import DirectoryContext, ServiceContext
    from ..settings import ServerSettings
    from ..terminal import ProgressBar

NAME = "serve"
HELP = "serve the OpenAI API over HTTP, on this machine unless told otherwise"

APART_FROM_CORES = 4
"""With fewer, a second process takes from the first what it spares it (docs/PERFORMANCE.md)."""


def add(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    add_model(parser)
    add_settings(parser, ("server", "runtime", "pool"), models=True)


def run(invocation: Invocation) -> int:
    """Serve until a signal says stop."""
    from ..server import ForcedStop, serve

    settings = invocation.settings
    keys = load_keys(settings.server.api_key_file, invocation.environment)
    require_keys(settings.server, keys)
    tracing = _tracing(settings.server)
    bar = progress_bar()
    served = _open(invocation, bar)
    try:
        with asyncio.Runner(loop_factory=loop_factory(settings.server.event_loop)) as runner:
            runner.run(
                serve(
                    served,
                    settings.server,
                    keys=keys,
                    tracing=tracing,
                    drain_timeout_s=settings.runtime.drain_timeout_s,
                    announce=lambda url: print(f"mlx-troupe is listening on {url}", flush=True),
                )
            )
    except ForcedStop:
        note("stopped before running requests had ended")
        return INTERRUPTED
    except TroupeError:
        raise
    except OSError as error:
        note(f"cannot listen on {settings.server.host}:{settings.server.port}: {error.strerror or error}")
        return FAILURE
    finally:
        if bar is not None:
            bar.close()
        tracing.close()
    return OK


def _open(invocation: Invocation, bar: ProgressBar | None) -> ServiceContext | DirectoryContext:
    settings, open_remote = invocation.settings, invocation.open_remote
    if settings.models:
        if settings.server.api_process == "on":
            raise SettingsError("api_process on: several models are served from one process, which is HTTP's too")
        return open_pool(settings.models, settings.pool)
    if open_remote is not None and is_apart(settings.server, settings.runtime, processors()):
        return open_remote(settings.runtime, bar, settings.server)
    return invocation.open_runtime(settings.runtime, bar)


def is_apart(server: ServerSettings, runtime: RuntimeConfig, cores: int) -> bool:
    """Whether HTTP and the engine get a process each. A trace wants all in one."""
    if server.api_process == "auto":
        return cores >= APART_FROM_CORES and not runtime.trace
    return server.api_process == "on"


def require_keys(settings: ServerSettings, keys: ApiKeys) -> None:
    """Raise SettingsError for an address that others can reach when there are no keys, unless that is meant."""
    from ..server import reaches_beyond_this_machine

    if reaches_beyond_this_machine(settings.host) and not keys and not settings.insecure:
        raise SettingsError(
            f"host {settings.host}: other machines could reach it, and there are no API keys; "
            "set --api-key-file, or add --insecure if that is meant"
        )


def _tracing(settings: ServerSettings) -> Tracing:
    if not settings.otel:
        return NO_TRACING
    try:
        return tracing_to_collector()
    except ImportError as error:
        raise SettingsError(f"otel: {error.name} is not installed; pip install 'mlx-troupe[otel]'") from None
