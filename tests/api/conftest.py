import asyncio
from collections.abc import AsyncIterator

import pytest

from .serving import Client, serving


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """A client of a server over a plain fake service. Nothing may be left running afterwards."""
    before = asyncio.all_tasks()
    async with serving() as found:
        yield found
    assert not asyncio.all_tasks() - before


@pytest.fixture(autouse=True)
async def _in_time() -> AsyncIterator[None]:
    """Fail a test that hangs, rather than the run."""
    async with asyncio.timeout(30):
        yield
