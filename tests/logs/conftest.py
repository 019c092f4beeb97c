"""What the tests of logging share: a stage of servers, and this process's own log as JSON."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))
sys.path.insert(0, str(Path(__file__).parent.parent / "fuzz"))

from log_story import LogFile
from stage import Stage

from envbus.logs import setup_logging


@pytest.fixture
def stage(nats_url: str, tmp_path: Path) -> Iterator[Stage]:
    """A stage without servers yet, at an address with a password."""
    own = Stage(nats_url.replace("nats://", "nats://trainer:pa55word@"), tmp_path)
    yield own
    own.close()


@pytest.fixture
def own_log(tmp_path: Path) -> Iterator[LogFile]:
    """What this process logs, at INFO until a test wants more."""
    tree = logging.getLogger("envbus")
    level, propagate = tree.level, tree.propagate
    file = tmp_path / "client.log"
    setup_logging("INFO", log_file=file, json=True, console=False)
    yield LogFile(file)
    setup_logging(console=False)
    tree.setLevel(level)
    tree.propagate = propagate
