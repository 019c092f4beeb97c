"""One ``envbus serve`` child process: how it is started, what it logged, and why it ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import site
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from envbus.bus.lifeline import Lifeline, kill_group, spawn_group
from envbus.errors import (
    EnvArgsError,
    EnvbusError,
    EnvironmentCrashedError,
    EnvironmentNotFoundError,
    LoaderMissingError,
    UsageError,
)
from envbus.logs import tail

QUOTED_LINES = 20
_ERROR_LINE = re.compile(r"error\[(\w+)\]: (.*)")
_TOLD_AS_THEY_ARE: tuple[type[EnvbusError], ...] = (
    UsageError,
    EnvironmentNotFoundError,
    LoaderMissingError,
    EnvArgsError,
)
"""Errors whose message says it all; other ends are told with the log."""


class ServerProcess:
    """A running or ended server.

    Args:
        options: Arguments of ``envbus serve``; no secret may be in them, every user can read them.
        variables: Added to its environment; secrets go here.
        log_file: Its output and errors are appended to this file.
        lifeline: Ends it when this process ends.

    Raises:
        UsageError: The log file cannot be written.
    """

    def __init__(
        self, options: Sequence[str], *, variables: Mapping[str, str], log_file: Path, lifeline: Lifeline
    ) -> None:
        self.log_file = log_file
        before, _ = own_import_paths()
        environ = {**os.environ, **variables, "PYTHONUNBUFFERED": "1"}
        if before:
            environ["PYTHONPATH"] = os.pathsep.join(before)
        try:
            log_file.parent.mkdir(parents=True, exist_ok=True)
            with log_file.open("ab") as log:
                self._log_start_bytes = log.tell()
                # -P: the folder where the user happens to be is no place to import from.
                command = [sys.executable, "-P", "-m", "envbus", "serve", *options]
                self._process = spawn_group(
                    command, lifeline=lifeline, env=environ, stdout=log, stderr=subprocess.STDOUT
                )
        except OSError as error:
            raise UsageError(f"cannot start a server that logs to {log_file}: {error}") from error

    @property
    def pid(self) -> int:
        """Its process id, and that of its group."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """As in subprocess: None while it runs, negative for a signal."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask it to stop in order."""
        if self.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill it, and what it started, at once."""
        if self.returncode is None:
            kill_group(self.pid)
        else:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    @property
    def end(self) -> str:
        """How it ended: ``exit code 3`` or ``signal SIGKILL``."""
        return describe_end(self.returncode)

    def log_tail(self) -> list[str]:
        """The last lines that this process wrote."""
        size_bytes = self.log_file.stat().st_size if self.log_file.exists() else 0
        return tail(self.log_file, QUOTED_LINES) if size_bytes > self._log_start_bytes else []

    def load_error(self, env_id: str) -> EnvbusError:
        """The error for a process that ended before it was ready."""
        lines = self.log_tail()
        said = _ERROR_LINE.search(lines[-1]) if lines else None
        for kind in _TOLD_AS_THEY_ARE:
            if said and said[1] == kind.code:
                return kind(said[2])
        return EnvironmentCrashedError(
            f"the server of env {env_id!r} ended while loading: {self.end}; {self.quoted_log()}"
        )

    def quoted_log(self) -> str:
        """The end of its log, for an error message."""
        quoted = "".join(f"\n    {line}" for line in self.log_tail()) or " (it is empty)"
        return f"the end of its log {self.log_file}:{quoted}"


def describe_end(returncode: int | None) -> str:
    """Say how a process ended."""
    if returncode is None:
        return "still running"
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"signal {-returncode}"


def own_import_paths() -> tuple[list[str], list[str]]:
    """Where this process imports from beyond the installed packages: before and after the standard library."""
    library = sysconfig.get_path("stdlib")
    standard = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    standard |= {sysconfig.get_config_var("DESTSHARED"), site.getusersitepackages(), *site.getsitepackages()}
    before: list[str] = []
    after: list[str] = []
    place = before
    for entry in sys.path:
        place = after if entry == library else place
        path = os.path.abspath(entry)
        if path not in standard and path not in before + after and os.path.isdir(path):
            place.append(path)
    return before, after
