"""Servers in this process for tests of what a server tells, and the programs that some tests need."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from chromium import find_chromium
from processes import Processes
from small_env import SmallEnv

from envbus import NATSEnvServer


@pytest.fixture
def serve(nats_url: str, prefix: str) -> Callable[..., AbstractAsyncContextManager[NATSEnvServer]]:
    """Serve a SmallEnv in this process for the time of a block."""

    @asynccontextmanager
    async def serving(
        environment: SmallEnv | None = None, *, address: str = nats_url, **options: Any
    ) -> AsyncIterator[NATSEnvServer]:
        server = NATSEnvServer(
            "small-env",
            address=address,
            prefix=prefix,
            environment=environment or SmallEnv(),
            handle_signals=False,
            **options,
        )
        running = asyncio.create_task(server.run())
        try:
            yield server
        finally:
            await server.close()
            await running

    return serving


@pytest.fixture
def processes(nats_url: str, prefix: str, tmp_path: Path) -> Iterator[Processes]:
    """The command line in processes of its own; all are killed after the test."""
    started = Processes(nats_url, prefix, tmp_path)
    yield started
    started.kill_all()


@pytest.fixture
def promtool() -> str:
    """The program that checks metrics."""
    return needed("promtool", shutil.which("promtool"), package="prometheus")


@pytest.fixture
def chromium() -> str:
    """A real browser."""
    return needed("Chromium", find_chromium(), package="chromium")


def needed(name: str, found: str | None, *, package: str) -> str:
    """CI installs what tests need, so there its absence is a failure."""
    if found is None:
        reason = f"{name} is not installed (Debian's package {package})"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found
