"""What the compatibility tests share. They run in virtual environments of their own: see the program ``run`` here."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet, importable_envs

from envbus.demo_model import DemoModel

SEED = 11


@pytest.fixture(autouse=True)
def kept_signals() -> Iterator[None]:
    """Environments of the classic library that a test loads here replace the handlers of signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
async def fleet(nats_url: str, prefix: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    """Launches servers with the command line."""
    fleet = Fleet(nats_url, prefix, tmp_path)
    try:
        yield fleet
    finally:
        fleet.reap()


@pytest.fixture
def demo() -> Iterator[DemoModel]:
    """A model endpoint."""
    with DemoModel.start(seed=SEED) as demo:
        yield demo


@pytest.fixture
def local_demo() -> Iterator[DemoModel]:
    """Its twin, for a local run: the same calls in the same order get the same answers."""
    with DemoModel.start(seed=SEED) as demo:
        yield demo


@pytest.fixture
def own_envs() -> Iterator[None]:
    """The environments of this folder can be imported."""
    with importable_envs():
        yield


@pytest.fixture
async def here(local_demo: DemoModel) -> AsyncIterator[Any]:
    """The classic library's model client for local runs."""
    from classic_equal import library_client

    client = library_client(local_demo.base_url)
    yield client
    await client.close()
