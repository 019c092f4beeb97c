from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bad_endpoint import BadEndpoint, MakeEndpoint

from envbus.environments import ModelClients

for _folder in ("e2e", "controller"):
    sys.path.append(str(Path(__file__).parent.parent / _folder))


@pytest.fixture
async def make_endpoint() -> AsyncIterator[MakeEndpoint]:
    """Make endpoints that listen; the clients that reach them are closed with the test."""
    made: list[BadEndpoint] = []

    def make() -> BadEndpoint:
        made.append(BadEndpoint())
        made[-1].open()
        return made[-1]

    yield make
    for endpoint in made:
        endpoint.close()


@pytest.fixture
async def endpoint(make_endpoint: MakeEndpoint) -> BadEndpoint:
    return make_endpoint()


@pytest.fixture
async def clients() -> AsyncIterator[ModelClients]:
    """Clients whose knowledge of endpoints is this test's own."""
    own = ModelClients()
    yield own
    await own.close()
