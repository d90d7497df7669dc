"""The runtime in a process of its own, so that HTTP and JSON never share an interpreter lock with the MLX thread.

    front process                                   engine process
    RemoteRuntime (a `Service`; no MLX)  -- Link -- EngineHost over a Runtime (tokenising to detokenising)

The two speak in msgpack messages over one Unix socket. In the engine process a turn's events of all streams leave in
one frame and one write; in the front process a frame is decoded once and handed to the streams' mailboxes.

Invariants:
- either process may die at any moment: the engine process ends by itself when the front is gone; when the engine
  process dies, every open request ends with an error, readiness turns red, and a new one is started, a few times;
- a front that does not read grows nothing: events wait and merge in the engine process, bounded by max_tokens;
- what one request sends or says can end that request alone, never the connection.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .child import start_child
    from .front import RemoteRuntime

_HOMES = {"RemoteRuntime": "front", "start_child": "child"}


def __getattr__(name: str) -> object:
    """Import on first use: each process needs its own half."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


__all__ = ["RemoteRuntime", "start_child"]
