"""When HTTP and the engine get a process each."""

from __future__ import annotations

import pytest

from mlx_troupe.api.commands.serve import APART_FROM_CORES, is_apart, processors
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


def test_cores_are_those_this_process_may_use() -> None:
    assert processors() >= 1
