"""A cluster for each test, and stages of server processes whose nodes a test chooses."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))

from nodes import Cluster, cluster
from stage import Stage


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster that only this test uses: it may kill nodes."""
    async with cluster(tmp_path) as own:
        yield own


@pytest.fixture
def stage(nodes: Cluster, tmp_path: Path) -> Iterator[Stage]:
    """A stage that knows all addresses of the cluster, without servers yet."""
    own = Stage(nodes.urls, tmp_path)
    yield own
    own.close()
