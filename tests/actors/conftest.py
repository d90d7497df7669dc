"""Fixtures of the actors' tests."""

from __future__ import annotations

import pytest

from tests.actors.bench import Bench
from tests.actors.desk import Desk


@pytest.fixture(params=[True, False], ids=["overlap", "no_overlap"])
def bench(request) -> Bench:
    return Bench(overlap=request.param)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture(params=[True, False], ids=["overlap", "no_overlap"])
def overlap(request) -> bool:
    return bool(request.param)
