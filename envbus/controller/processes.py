"""The server processes of one controller: launched, found again, signalled, and seen ending.

Each leads a process group of its own and writes to a log file of its own. What a
server leaves behind when it ends is found by a mark in its environment and killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from envbus.bus.lifeline import Lifeline, kill_group, spawn_group
from envbus.controller.instructions import Launch
from envbus.controller.spec import ControllerSpec, EnvSpec
from envbus.environments.server_process import describe_end, own_import_paths
from envbus.logs import tail

MARK_VAR = "ENVBUS_SERVER"
"""Environment variable with the server's id, inherited by everything that the server starts."""
QUOTED_LINES = 12
QUOTED_CHARS = 2_000
KEPT_LOGS = 200
"""Ended servers whose logs operators can still ask for over the bus."""
_SAME_START_S = 0.05
_LOG_LINE = re.compile(r"\{|\S+ \S+ (DEBUG|INFO|WARNING)\b")
"""What a server logs while it works, as text or JSON: not why it ended."""


@dataclass(frozen=True, slots=True)
class Record:
    """What is needed to find a server process again."""

    server: str
    env: str
    slot: int
    generation: int
    digest: str
    """Of the env's description that it was launched with."""
    pid: int
    create_time: float
    """As the operating system tells it: another process with this pid has another."""
    log_file: str
    launched_at: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended."""

    record: Record
    how: str
    """``exit code 2`` or ``signal SIGKILL``."""
    lines: tuple[str, ...]
    """The last ones of its log."""

    @property
    def summary(self) -> str:
        """How it ended, in one line."""
        return self.reason.partition("\n")[0]

    @property
    def reason(self) -> str:
        """How it ended, with its last words if it failed: in the first line what says why, if its last one does."""
        if self.how == "exit code 0" or not self.lines:
            return self.how
        told = self.how.startswith("exit code") and not _LOG_LINE.match(self.lines[-1])
        first = f"{self.how}: {self.lines[-1][:QUOTED_CHARS]}" if told else self.how
        quoted = "\n".join(self.lines[:-1] if told else self.lines)[-QUOTED_CHARS:]
        indented = "".join(f"\n    {line}" for line in quoted.splitlines())
        return f"{first}\n    the end of its log {self.record.log_file}{', before that' * told}:{indented}"


@dataclass(slots=True)
class _Running:
    record: Record
    popen: subprocess.Popen[bytes] | None
    """None for a process of an earlier controller."""
    is_asked_to_end: bool = False


class Processes:
    """Starts and ends server processes.

    Args:
        controller_id: Passed on to the servers.
        controller: Where logs go, and whether servers outlive this process.
        prefix: First token of all subjects.
        variables: For all servers: the address of NATS.
    """

    def __init__(
        self, controller_id: str, controller: ControllerSpec, *, prefix: str, variables: Mapping[str, str]
    ) -> None:
        self._controller_id = controller_id
        self._spec = controller
        self._prefix = prefix
        self._variables = dict(variables)
        self._lifeline = None if controller.adopt else Lifeline()
        self._running: dict[str, _Running] = {}
        self.log_files: dict[str, str] = {}
        """Log files by server id; of ended servers, too, but only the last ones."""

    def close(self) -> None:
        """Let go; servers that still run end, unless they are to be adopted."""
        if self._lifeline is not None:
            self._lifeline.close()

    def records(self) -> list[Record]:
        """All processes that have not ended."""
        return [running.record for running in self._running.values()]

    def record(self, server: str) -> Record | None:
        """One of them."""
        running = self._running.get(server)
        return running.record if running is not None else None

    def launch(self, order: Launch, env: EnvSpec) -> Record:
        """Start a server.

        Raises:
            OSError: The program or the log file is of no use.
        """
        log_file = self._log_file(order, env)
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("xb") as log:
            popen = spawn_group(
                [*serve_program(env), "serve", *self._options(env)],
                lifeline=self._lifeline,
                env=self._environ(order, env),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        record = Record(
            server=order.server,
            env=order.env,
            slot=order.slot,
            generation=order.generation,
            digest=env.digest,
            pid=popen.pid,
            create_time=_create_time(popen.pid) or 0.0,
            log_file=str(log_file),
            launched_at=time.time(),
        )
        self._running[order.server] = _Running(record, popen)
        self._remember_log(record)
        return record

    def adopt(self, record: Record) -> bool:
        """Take over a process of an earlier controller; False if it is not there any more."""
        if not _is_same_process(record):
            return False
        self._running[record.server] = _Running(record, None)
        self._remember_log(record)
        return True

    def stop(self, server: str) -> None:
        """Ask it to end in order; asked again it cancels its rollouts."""
        running = self._running.get(server)
        if running is not None and self._how(running) is None:
            # A second SIGTERM would be one with the first as long as that is pending.
            number = signal.SIGINT if running.is_asked_to_end else signal.SIGTERM
            running.is_asked_to_end = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.record.pid, number)

    def kill(self, server: str) -> None:
        """Kill it and all that it started."""
        running = self._running.get(server)
        if running is not None and self._how(running) is None:
            kill_group(running.record.pid)

    def ended(self) -> list[Ended]:
        """The processes that ended since the last call; their remains are killed."""
        found = [(running, how) for running in self._running.values() if (how := self._how(running)) is not None]
        for running, _ in found:
            del self._running[running.record.server]
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(running.record.pid, signal.SIGKILL)
        return [Ended(running.record, how, _last_lines(running.record)) for running, how in found]

    def cpu_s(self, server: str) -> float | None:
        """CPU time used so far by a server and what it started."""
        running = self._running.get(server)
        if running is None:
            return None
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(running.record.pid)
            return sum(_own_cpu_s(one) for one in [process, *process.children(recursive=True)])
        return None

    def _remember_log(self, record: Record) -> None:
        self.log_files[record.server] = record.log_file
        ended = [server for server in self.log_files if server not in self._running]
        for server in ended[: max(0, len(ended) - KEPT_LOGS)]:
            del self.log_files[server]

    def _how(self, running: _Running) -> str | None:
        if running.popen is not None:
            code = running.popen.poll()
            return None if code is None else describe_end(code)
        return None if _is_same_process(running.record) else "an end that nobody saw (it was taken over)"

    def _options(self, env: EnvSpec) -> list[str]:
        options = ["--prefix", self._prefix, "--log-level", env.log_level, "--verbose"]
        options += ["--max-concurrent", str(env.max_concurrent), "--grace", str(env.grace)]
        options += ["--name", env.name] if env.name is not None else []
        options += ["--json-logs"] if self._spec.json_logs else []
        for pair in env.allow_keys:
            options += ["--allow-key", pair]
        for folder in env.env_dir_path:
            options += ["--env-dir-path", str(folder)]
        return [*options, "--", env.id]

    def _environ(self, order: Launch, env: EnvSpec) -> dict[str, str]:
        environ = {**os.environ, **self._variables, **env.variables, "PYTHONUNBUFFERED": "1"}
        before, _ = own_import_paths()
        if before and env.python is None and env.command is None:
            environ["PYTHONPATH"] = os.pathsep.join(before)
        return environ | {
            MARK_VAR: order.server,
            "ENVBUS_SERVE_SERVER_ID": order.server,
            "ENVBUS_SERVE_CONTROLLER": self._controller_id,
            "ENVBUS_SERVE_ENV_ARGS": json.dumps(env.args),
            "ENVBUS_SERVE_EXTRA_ENV_KWARGS": json.dumps(env.extra_env_kwargs),
        }

    def _log_file(self, order: Launch, env: EnvSpec) -> Path:
        started = time.strftime("%Y%m%dT%H%M%S")
        folder = env.log_dir or self._spec.log_dir / re.sub(r"[^A-Za-z0-9._~@-]", "_", order.env)
        return folder / f"{order.slot}-{started}-{order.server[:8]}.log"


def kill_marked(servers: set[str]) -> int:
    """Kill whatever carries the mark of a server that has ended; how many there were. Takes a while."""
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK_VAR) in servers and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                count += 1
    return count


def serve_program(env: EnvSpec) -> list[str]:
    """The program that ``serve`` and its options are given to."""
    # -P: the folder where the operator happens to be is no place to import from.
    return env.command or [env.python or sys.executable, "-P", "-m", "envbus"]


def _last_lines(record: Record) -> tuple[str, ...]:
    return tuple(tail(record.log_file, QUOTED_LINES))


def _create_time(pid: int) -> float | None:
    with contextlib.suppress(psutil.Error):
        created: float = psutil.Process(pid).create_time()
        return created
    return None


def _is_same_process(record: Record) -> bool:
    try:
        process = psutil.Process(record.pid)
        is_same = abs(process.create_time() - record.create_time) < _SAME_START_S
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _own_cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
