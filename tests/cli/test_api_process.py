"""When HTTP and the engine get a process each."""

from __future__ import annotations

import pytest

from mlx_troupe.api.commands.serve import APART_FROM_CORES, is_apart
from mlx_troupe.api.processors import processors
from mlx_troupe.api.settings import ServerSettings
from mlx_troupe.runtime.config import RuntimeConfig


@pytest.mark.parametrize(
    ("setting", "cores", "trace", "apart"),
    [
        ("auto", APART_FROM_CORES, "", True),
        ("auto", APART_FROM_CORES - 1, "", False),
        ("auto", 64, "trace.json", False),
        ("on", 1, "", True),
        ("on", 1, "trace.json", True),
        ("off", 64, "", False),
    ],
)
def test_auto_goes_by_cores_and_the_rest_is_said(setting, cores, trace, apart) -> None:
    assert is_apart(ServerSettings(api_process=setting), RuntimeConfig(trace=trace), cores) is apart


def test_cores_are_those_this_process_may_use(tmp_path) -> None:
    quota = tmp_path / "cpu.max"
    free = processors(quota)
    assert free >= 1
    for text, cores in (("50000 100000", 1), ("100001 100000", min(2, free)), ("max 100000", free), ("1 0", free)):
        quota.write_text(text)
        assert processors(quota) == cores
