"""The lines: which ceiling binds, and that each line lies where it should."""

from __future__ import annotations

import pytest

from mlx_troupe.actors.memory_limits import Machine, derive_limits
from mlx_troupe.runtime.memory_probe import container_bytes, footprint_bytes, machine_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("machine", "tier", "limit", "own", "abort", "dynamic", "binding"),
    [
        ((100, 90), "safe", None, 1, 70, 70, "memory tier"),
        ((100, 90), "balanced", None, 1, 80, 80, "memory tier"),
        ((100, 98), "aggressive", None, 1, 90, 90, "memory tier"),
        ((100, 90), "balanced", 10, 1, 10, 10, "memory_limit_bytes"),
        ((100, 20), "balanced", None, 10, 80, 28, "other programs"),
        ((100, 0), "balanced", None, 1, 80, 0, "other programs"),
        ((100, 90, 40), "balanced", None, 1, 38, 38, "container limit"),
        ((100, 90, 40), "balanced", 50, 1, 38, 38, "container limit"),
        ((100, 90, None, 60), "balanced", None, 1, 57, 57, "device"),
        ((100, 90, None, 140, False), "safe", None, 1, 98, 98, "memory tier"),
        ((100, 1, None, 140, False), "safe", None, 1, 98, 98, "memory tier"),
    ],
)
def test_limits(machine, tier, limit, own, abort, dynamic, binding) -> None:
    sizes = [None if part is None or isinstance(part, bool) else part * GIB for part in machine]
    fields = dict(zip(("total_bytes", "available_bytes", "container_bytes", "device_bytes"), sizes, strict=False))
    found = derive_limits(
        Machine(**fields, unified=len(machine) < 5), tier, None if limit is None else limit * GIB, own * GIB
    )
    assert found.abort_bytes == pytest.approx(abort * GIB, abs=2)
    assert found.dynamic_bytes == pytest.approx(dynamic * GIB, abs=2)
    assert found.binding == binding
    assert found.admission_bytes <= found.dynamic_bytes <= found.abort_bytes
    assert found.soft_bytes < found.dynamic_bytes or not found.dynamic_bytes
    assert found.admission_bytes <= found.stable_admission_bytes < found.preempt_bytes < found.abort_bytes
    assert found.remedy
    assert found.stable_remedy


def test_probes_tell_plausible_sizes(tmp_path) -> None:
    total, available = machine_bytes()
    assert 0 < available <= total
    assert 1 << 20 < footprint_bytes() < total
    limited, unlimited = tmp_path / "limited", tmp_path / "unlimited"
    limited.write_text("123456789\n")
    unlimited.write_text("max\n")
    assert container_bytes((str(tmp_path / "none"), str(unlimited))) is None
    assert container_bytes((str(unlimited), str(limited))) == 123456789
