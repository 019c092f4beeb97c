from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from operator_site import Cli, Site

from envbus.bus.embedded import EmbeddedNats


@pytest.fixture
def site(tmp_path: Path, nats_url: str) -> Iterator[Site]:
    """A site of one test's own."""
    own = Site(Cli(tmp_path), nats_url)
    try:
        yield own
    finally:
        own.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, session_nats: EmbeddedNats) -> Iterator[Site]:
    """Two envs with one server each, for tests that leave them as they are."""
    folder = tmp_path_factory.mktemp("site")
    site = Site(Cli(folder), session_nats.url)
    try:
        site.serve("probe-env", "--name", "probe", "--max-concurrent", "3", "--log-file", str(folder / "probe.log"))
        site.serve("reverse-text")
        yield site
    finally:
        site.close()
