"""Fixtures of fleets, for the packages of tests that run controllers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from controller_stage import Fleet


@pytest.fixture
def make_fleet(tmp_path: Path, nats_url: str, prefix: str) -> Iterator[Callable[..., Fleet]]:
    """Makes fleets on the suite's bus, or at another address; kills what they leave."""
    made: list[Fleet] = []

    def make(controller_id: str = "one", address: str = nats_url) -> Fleet:
        made.append(Fleet(tmp_path, address, prefix, controller_id=controller_id))
        return made[-1]

    yield make
    for fleet in made:
        fleet.kill_all()


@pytest.fixture
def fleet(make_fleet: Callable[..., Fleet]) -> Fleet:
    return make_fleet()
