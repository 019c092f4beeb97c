"""``envbus gateway`` in a process of its own, in front of the fleet of a test."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator

from fleet import Fleet


@contextlib.asynccontextmanager
async def gateway(fleet: Fleet, *envs: str) -> AsyncIterator[list[str]]:
    """The addresses, one for each env."""
    command = [sys.executable, "-P", "-m", "envbus", "gateway", "--address", fleet.url, "--prefix", fleet.prefix]
    for env in envs:
        command += ["--listen", "tcp://127.0.0.1:0", "--env", env]
    process = _started(command)
    assert process.stdout is not None
    try:
        lines = [await asyncio.to_thread(process.stdout.readline) for _ in envs]
        yield [line.split(" is at ")[1].strip() for line in lines]
    finally:
        process.terminate()
        with process.stdout:
            assert process.wait(30) == 0


def _started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
