"""Stages for end-to-end tests: server processes that are always reaped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
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
    common.launch()
    yield common
    common.close()
