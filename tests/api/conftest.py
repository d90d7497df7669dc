from collections.abc import AsyncIterator

import pytest

from .serving import Client, serving


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """A client of a server over a plain fake service."""
    async with serving() as found:
        yield found
