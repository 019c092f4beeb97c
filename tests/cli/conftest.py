from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_forks import CliForks
from cli_process import ENVS, Cli, wait_for_line


@pytest.fixture
def cli(tmp_path: Path, cli_forks: CliForks) -> Iterator[Cli]:
    """The command line, run in an empty folder; whatever a failed test leaves is killed."""
    cli = Cli(tmp_path, cli_forks)
    yield cli
    cli.kill_all()


@pytest.fixture
def serve(cli: Cli, nats_url: str, prefix: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start ``envbus serve`` on the suite's bus and wait until it is ready."""
    started: list[subprocess.Popen[str]] = []

    def start(env_id: str, *options: str, until: str = "is ready") -> subprocess.Popen[str]:
        where = ("--prefix", prefix, "--env-dir-path", str(ENVS), "--allow-url", "http://127.0.0.1:*")
        process = cli.start("serve", env_id, *where, *options, variables={"NATS_URL": nats_url})
        started.append(process)
        if until:
            wait_for_line(process, until, stream="stderr")
        return process

    yield start
    for process in started:
        process.terminate()
    for process in started:
        process.communicate(timeout=60)
