"""Stages of server processes, and raw DEALER sockets that speak to a gateway as the library's clients do."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))

from dealers import Dealers
from stage import Stage

from envbus.bus.embedded import EmbeddedNats


@pytest.fixture
def stage(nats_url: str, tmp_path: Path) -> Iterator[Stage]:
    """A stage for one test, without servers yet."""
    own = Stage(nats_url, tmp_path)
    yield own
    own.close()


@pytest.fixture(scope="module")
def shared(session_nats: EmbeddedNats, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A stage with one server of 4 slots, for all tests of a module that leave it as it was."""
    common = Stage(session_nats.url, tmp_path_factory.mktemp("stage"))
    common.launch(env_id="episode-env")
    yield common
    common.close()


@pytest.fixture
async def dealers() -> AsyncIterator[Dealers]:
    """Makes DEALER sockets; closes them."""
    own = Dealers()
    yield own
    own.close()
