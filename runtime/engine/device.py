"""Facts about the device MLX runs on. Call on an MLX thread."""

from __future__ import annotations

import platform
from typing import Any, TypedDict

import mlx.core as mx

from ..heap import give_back, kept_bytes


class DeviceMemory(TypedDict):
    """See EngineFacts."""

    device_bytes: int
    unified: bool


def backend() -> str:
    """ "metal", "cuda" or "cpu": what default operations run on."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if platform.system() == "Darwin" else "cuda"


def device_facts() -> dict[str, Any]:
    """Backend, MLX's description of the device, and memory counters in bytes."""
    try:
        info = dict(mx.device_info())
    except (RuntimeError, ValueError, TypeError):
        info = {}
    return {
        "backend": backend(),
        "device": info.get("device_name", platform.processor() or platform.machine()),
        "device_memory_bytes": info.get("memory_size", 0),
        "recommended_working_set_bytes": info.get("max_recommended_working_set_size", 0),
        "active_bytes": mx.get_active_memory(),
        "pool_bytes": mx.get_cache_memory(),
        "peak_bytes": mx.get_peak_memory(),
    }


def device_memory() -> DeviceMemory:
    """What the device recommends to use, and whether it shares the machine's memory."""
    kind = backend()
    if kind == "cpu":
        return DeviceMemory(device_bytes=0, unified=True)
    facts = device_facts()
    size = facts["recommended_working_set_bytes"] or facts["device_memory_bytes"]
    return DeviceMemory(device_bytes=int(size), unified=kind == "metal")


def pool_bytes() -> int:
    """Freed bytes kept for the next step: MLX's pool, and on a processor malloc's (see `heap`)."""
    return mx.get_cache_memory() + (kept_bytes() if backend() == "cpu" else 0)


def empty_pool() -> None:
    """Return freed memory to the system."""
    mx.clear_cache()
    if backend() == "cpu":
        give_back()


def donation_copies() -> bool:
    """Whether launching a step ahead copied a KV buffer in a small trial (see `overlap`)."""
    size = (1, 8, 4096, 64)
    buffer = mx.zeros(size)
    new = mx.ones((1, 8, 1, 64))
    mx.eval(buffer, new)
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    last = None
    for place in range(6):
        buffer = mx.slice_update(buffer, new, mx.array([place]), axes=(2,))
        seen = (buffer[:, :, : place + 64] * 2.0).sum()
        mx.async_eval(seen)
        if last is not None:
            mx.eval(last)
        last = seen
    mx.eval(last)
    return mx.get_peak_memory() - base > buffer.nbytes // 2


def clear_streams() -> None:
    """Finish and forget the calling thread's streams, before it ends.

    A thread that used MLX and ended without this can abort the process at exit ("terminate called without an active
    exception": 11 of 80 runs under load, none with it).
    """
    mx.synchronize()
    mx.clear_streams()
