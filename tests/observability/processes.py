"""Runs ``envbus`` commands in processes of their own, which a test may kill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO


class Processes:
    """Every process that one test started, on its bus and prefix."""

    def __init__(self, url: str, prefix: str, folder: Path) -> None:
        self._url = url
        self._prefix = prefix
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "envbus", *arguments, "--address", self._url, "--prefix", self._prefix]

    def start(self, *arguments: str, until: str, stream: str = "stderr") -> tuple[subprocess.Popen[str], str]:
        """Start a command and wait until it says something; returns that line too. The test's timeout bounds it."""
        process = subprocess.Popen(
            self._command(*arguments),
            cwd=self._folder,
            env={**os.environ, "COLUMNS": "200"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if stream == "stdout" else subprocess.DEVNULL,
            stderr=subprocess.PIPE if stream == "stderr" else subprocess.DEVNULL,
            text=True,
        )
        self._started.append(process)
        pipe: IO[str] | None = getattr(process, stream)
        assert pipe is not None
        said = []
        for line in pipe:
            said.append(line)
            if until in line:
                return process, line
        raise AssertionError(f"{arguments} ended without saying {until!r}: {said}")

    def run(self, *arguments: str) -> str:
        """Run a command to its end; what it printed."""
        done = subprocess.run(
            self._command(*arguments), cwd=self._folder, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    def serve(self, env_id: str, *options: str) -> subprocess.Popen[str]:
        """Start a server and wait until it takes jobs."""
        return self.start("serve", env_id, "--allow-url", "http://127.0.0.1:*", *options, until="is ready")[0]

    def dashboard(self, *options: str) -> tuple[subprocess.Popen[str], str]:
        """Start a dashboard; returns its address too."""
        process, line = self.start("dashboard", *(options or ("--port", "0")), until="http://", stream="stdout")
        return process, line.split()[-1]

    def kill_all(self) -> None:
        for process in self._started:
            process.kill()
        for process in self._started:
            process.wait(30)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
