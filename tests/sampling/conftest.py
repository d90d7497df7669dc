"""mlx-lm's filters are compiled functions; running them as they are saves a compiler call per set of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def plain_functions() -> Iterator[None]:
    """No mx.compile in these tests."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(autouse=True, params=["device", "host"])
def where_rows_draw(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs with draws on the device and on the host."""
    from mlx_troupe.runtime.engine.sampling import sampler

    monkeypatch.setattr(sampler, "_draws_on_host", lambda: request.param == "host")
    return request.param
