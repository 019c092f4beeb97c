"""Runs the real command line in processes of its own, and finds what they leave behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from cli_forks import CliForks

ENVS = Path(__file__).parent / "envs"
MARK = "ENVBUS_TEST_MARK"
GONE_S = 20.0
"""How long what a command leaves may take to end: an instant, on an idle machine."""
QUICK = {"ENVBUS_CLIENT_NO_SERVER_TIMEOUT_S": "1", "ENVBUS_CLIENT_CONNECT_TIMEOUT_S": "1"}


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    seconds: float


@dataclass
class Cli:
    """Starts commands in one folder; every process that comes of them carries a mark in its environment.

    With forks, commands that are run to their end need not import everything anew.
    """

    folder: Path
    forks: CliForks | None = None
    variables: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: secrets.token_hex(8))

    def environ(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        return {
            **os.environ,
            **self.variables,
            **(extra or {}),
            MARK: self.mark,
            "COLUMNS": "200",
            "TMPDIR": str(self.folder),
        }

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "envbus", *arguments]

    def run(
        self,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
        timeout_s: float = 120,
        fresh: bool = False,
    ) -> Ended:
        """Run a command to its end; a fresh one starts from nothing, as from a shell."""
        started = time.monotonic()
        if self.forks is None or fresh:
            done = subprocess.run(
                self.command(*arguments),
                cwd=self.folder,
                env=self.environ(variables),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                stdin=subprocess.DEVNULL,
            )
            return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - started)
        [ended] = self.run_all([arguments], variables=variables, timeout_s=timeout_s)
        return ended

    def run_all(
        self,
        commands: Iterable[Sequence[str]],
        *,
        variables: Mapping[str, str] | None = None,
        timeout_s: float = 120,
    ) -> list[Ended]:
        """Run commands that have nothing to do with each other, some at the same time."""
        assert self.forks is not None
        started = time.monotonic()
        lines = [list(command) for command in commands]
        done = self.forks.run(lines, folder=self.folder, environ=self.environ(variables), timeout_s=timeout_s)
        return [Ended(*ended, time.monotonic() - started) for ended in done]

    def start(self, *arguments: str, variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environ(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def processes(self) -> list[psutil.Process]:
        """What still runs of this Cli's commands."""
        return list(marked_processes(self.mark))

    def wait_all_gone(self, limit_s: float = GONE_S) -> None:
        deadline = time.monotonic() + limit_s
        while (left := self.processes()) and time.monotonic() < deadline:
            psutil.wait_procs(left, timeout=0.05)
        assert not left, f"still there after {limit_s} s: {[process.cmdline() for process in left]}"

    def kill_all(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


def marked_processes(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                yield process


def wait_for_line(process: subprocess.Popen[str], text: str, *, stream: str = "stdout") -> str:
    """Read lines until one has the text; the test's timeout bounds it."""
    pipe = getattr(process, stream)
    for line in pipe:
        if text in line:
            return str(line)
    raise AssertionError(f"the process ended without saying {text!r}")
