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
