"""A stage of server processes on a nats-server that counts messages and slow consumers, for each test."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))

from monitored_bus import MonitoredBus
from stage import Stage

from envbus.bus.embedded import EmbeddedNats


@pytest.fixture
async def bus() -> AsyncIterator[MonitoredBus]:
    """A nats-server that only this test uses, with its monitoring."""
    async with EmbeddedNats(config="http: '127.0.0.1:-1'") as nats:
        yield MonitoredBus(nats)


@pytest.fixture
def monitored(bus: MonitoredBus, tmp_path: Path) -> Iterator[Stage]:
    """A stage on it, without servers yet."""
    own = Stage(bus.url, tmp_path)
    yield own
    own.close()


@pytest.fixture
def stage(nats_url: str, tmp_path: Path) -> Iterator[Stage]:
    """A stage on the suite's nats-server, without servers yet."""
    own = Stage(nats_url, tmp_path)
    yield own
    own.close()
