from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))
sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))
sys.path.insert(0, str(Path(__file__).parent.parent / "controller"))

from cli_forks import CliForks
from cli_process import Cli
from fleet_fixtures import fleet, make_fleet
from stage import Stage

from envbus.bus.embedded import EmbeddedNats

__all__ = ["cli", "fleet", "make_fleet", "stage", "trio"]


@pytest.fixture
def stage(nats_url: str, tmp_path: Path) -> Iterator[Stage]:
    """Server processes of the stage environment for one test, none yet."""
    own = Stage(nats_url, tmp_path)
    yield own
    own.close()


@pytest.fixture(scope="module")
def trio(session_nats: EmbeddedNats, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Three servers in one queue group, for all tests of a module that leave them as they were."""
    common = Stage(session_nats.url, tmp_path_factory.mktemp("stage"))
    for _ in range(3):
        common.launch(max_concurrent=16)
    yield common
    common.close()


@pytest.fixture
def cli(tmp_path: Path, cli_forks: CliForks) -> Iterator[Cli]:
    """The command line, run in an empty folder; whatever a failed test leaves is killed."""
    own = Cli(tmp_path, cli_forks)
    yield own
    own.kill_all()
