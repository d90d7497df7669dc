"""What this machine can do: the rates that floors are worked out from, measured here and now."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from .case import least_s

if TYPE_CHECKING:
    from collections.abc import Callable

COPY_BYTES = 256 << 20
MATRIX = 1024
HOST_COPY_BYTES = 64 << 20
CALLS = 10_000
HOPS = 2_000


class MachineRates(msgspec.Struct, frozen=True):
    """Measured limits.

    Attributes:
        device_bytes_s: bytes MLX's device reads and writes a second, in a copy of a large array.
        device_flops_s: floating-point operations a second of a float32 or bfloat16 matrix product.
        dtype: of that product.
        host_bytes_s: bytes the host copies a second (read and written once each counts once).
        call_s: one call of a Python function of one argument.
        hop_s: one `call_soon` of a busy asyncio loop.
    """

    device_bytes_s: float
    device_flops_s: float
    dtype: str
    host_bytes_s: float
    call_s: float
    hop_s: float

    def floor_s(self, bytes_moved: float, operations: float = 0.0) -> tuple[float, str]:
        """The larger of bytes over bandwidth and operations over rate, and which it is, in words."""
        by_bytes, by_rate = bytes_moved / self.device_bytes_s, operations / self.device_flops_s
        if by_bytes >= by_rate:
            return by_bytes, f"{bytes_moved / 1e6:.3g} MB over {self.device_bytes_s / 1e9:.3g} GB/s"
        return by_rate, f"{operations / 1e9:.3g} GFLOP over {self.device_flops_s / 1e9:.3g} GFLOP/s"


def measure_rates(dtype: str) -> MachineRates:
    """Measure them; a few seconds. MLX work runs on this thread.

    The best of several is taken, since a floor is what can be had. On the CPU backend the device's memory is the
    host's, and MLX's fresh buffers would measure page faults, so the host's copy stands for both.
    """
    import mlx.core as mx
    import numpy as np

    from mlx_troupe.runtime.engine.device import backend

    matrix = mx.random.normal((MATRIX, MATRIX)).astype(getattr(mx, dtype))
    mx.eval(matrix)
    product_s = least_s(lambda: mx.eval(matrix @ matrix), 10)
    source = np.ones(HOST_COPY_BYTES // 4, np.float32)
    target = np.zeros_like(source)
    host_s = least_s(lambda: np.copyto(target, source), 20)
    return MachineRates(
        device_bytes_s=2 * HOST_COPY_BYTES / host_s if backend() == "cpu" else _device_bytes_s(),
        device_flops_s=2 * MATRIX**3 / product_s,
        dtype=dtype,
        host_bytes_s=HOST_COPY_BYTES / host_s,
        call_s=least_s(lambda: _calls(_same), 10) / CALLS,
        hop_s=least_s(lambda: asyncio.run(_hops()), 5) / HOPS,
    )


def _device_bytes_s() -> float:
    import mlx.core as mx

    source = mx.ones((COPY_BYTES // 4,), mx.float32)
    mx.eval(source)
    return 2 * COPY_BYTES / least_s(lambda: mx.eval(mx.abs(source)), 10)


def _same(number: int) -> int:
    return number


def _calls(function: Callable[[int], int]) -> None:
    for number in range(CALLS):
        function(number)


async def _hops() -> None:
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def hop(left: int) -> None:
        if left:
            loop.call_soon(hop, left - 1)
        else:
            done.set_result(None)

    hop(HOPS)
    await done
