"""A nats-server with the generated configuration, one for each mode and module."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from attacked_bus import MODES, AttackedBus, generated

from envbus.bus.embedded import EmbeddedNats


@pytest.fixture(params=MODES, scope="module")
def mode(request: pytest.FixtureRequest) -> str:
    """Roles in one account, or an account for each trainer."""
    return str(request.param)


@pytest.fixture(scope="module")
def shared_bus(mode: str, clean_environment: None) -> Iterator[AttackedBus]:
    """A bus for tests that leave it as it was, or give it their own configuration."""
    access = generated(mode)
    with ThreadPoolExecutor(1) as elsewhere:  # pytest has a loop of its own here
        nats = elsewhere.submit(asyncio.run, EmbeddedNats.start(config=access.config)).result()
        yield AttackedBus(nats, access)
        elsewhere.submit(asyncio.run, nats.stop()).result()
