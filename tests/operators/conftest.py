from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_forks import CliForks
from operator_site import Cli, Site

from envbus.bus.embedded import EmbeddedNats


@pytest.fixture
def site(tmp_path: Path, nats_url: str, cli_forks: CliForks) -> Iterator[Site]:
    """A site of one test's own."""
    own = Site(Cli(tmp_path, cli_forks), nats_url)
    try:
        yield own
    finally:
        own.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, session_nats: EmbeddedNats, cli_forks: CliForks) -> Iterator[Site]:
    """Two envs with one server each, for tests that leave them as they are."""
    folder = tmp_path_factory.mktemp("site")
    site = Site(Cli(folder, cli_forks), session_nats.url)
    try:
        probe = ["probe-env", "--name", "probe", "--max-concurrent", "3", "--log-file", str(folder / "probe.log")]
        site.serve(probe, ["reverse-text"])
        yield site
    finally:
        site.close()
