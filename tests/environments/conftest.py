from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from env_model_stub import ModelStub

from envbus.environments import stages as stages_module


@pytest.fixture
async def stub() -> AsyncIterator[ModelStub]:
    """A model endpoint; the clients that reach it are closed with the test."""
    server = ModelStub()
    yield server
    server.close()


@pytest.fixture
def sync_stub() -> Iterator[ModelStub]:
    """For tests without an event loop."""
    server = ModelStub()
    yield server
    server.close()


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollout retries without the waits; the retry rules stay."""
    monkeypatch.setattr(stages_module, "RETRY_INITIAL_S", 0.0)
    monkeypatch.setattr(stages_module, "RETRY_MAX_S", 0.0)
