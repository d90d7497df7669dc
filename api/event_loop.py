"""Which event loop runs the server, and the engine process if there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .options import SettingsError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the loop of a setting's name, None for asyncio's own. Raises SettingsError where it is missing."""
    if name == "asyncio":
        return None
    try:
        import uvloop
    except ImportError:
        if name == "uvloop":
            raise SettingsError("event_loop uvloop: it is not installed; pip install 'mlx-troupe[uvloop]'") from None
        return None
    return uvloop.new_event_loop  # type: ignore[no-any-return]
