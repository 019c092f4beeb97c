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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from envbus.bus.lifeline import Lifeline, kill_group, spawn_group
from envbus.controller.confinement import confined, serve_program, variables_for
from envbus.controller.enclosures import Enclosure, Enclosures
from envbus.controller.instructions import Launch
from envbus.controller.spec import ControllerSpec, EnvSpec
from envbus.environments.server_process import describe_end, own_import_paths
from envbus.errors import UsageError
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
_NO_MEMORY = re.compile(r"MemoryError|bad_alloc|[Cc]annot allocate memory|[Oo]ut of memory")


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
    cgroup: str = ""
    scratch: str = ""
    address_space_bytes: int = 0
    """What it may have of it at most; 0: any."""

    @property
    def enclosure(self) -> Enclosure:
        """What was made for it."""
        return Enclosure(*(Path(path) if path else None for path in (self.cgroup, self.scratch)))


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended."""

    record: Record
    how: str
    """``exit code 2`` or ``signal SIGKILL``."""
    lines: tuple[str, ...]
    """The last ones of its log."""
    cause: str = ""
    """Of an end that one of its limits brought about."""

    @property
    def summary(self) -> str:
        """How it ended, in one line."""
        return self.reason.partition("\n")[0]

    @property
    def reason(self) -> str:
        """How it ended, with its last words if it failed: in the first line what says why, if its last one does."""
        if self.how == "exit code 0":
            return self.how
        how = f"{self.how} ({self.cause})" if self.cause else self.how
        if not self.lines:
            return how
        told = self.how.startswith("exit code") and not _LOG_LINE.match(self.lines[-1])
        first = f"{how}: {self.lines[-1][:QUOTED_CHARS]}" if told else how
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
        allow_urls: For all servers: what they may call beside that of their env.
    """

    def __init__(
        self,
        controller_id: str,
        controller: ControllerSpec,
        *,
        prefix: str,
        variables: Mapping[str, str],
        allow_urls: Sequence[str] = (),
    ) -> None:
        self._controller_id = controller_id
        self._spec = controller
        self._prefix = prefix
        self._variables = dict(variables)
        self._allow_urls = tuple(allow_urls)
        self._lifeline = None if controller.adopt else Lifeline()
        self._enclosures = Enclosures(controller.cgroup)
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
            OSError: The program, the log file or what isolates it is of no use.
            UsageError: The user or the cgroup folder is not there any more.
        """
        log_file = self._log_file(order, env)
        enclosure = self._enclosures.make(order.server, env)
        try:
            popen = self._spawn(order, env, log_file=log_file, enclosure=enclosure)
        except BaseException:
            enclosure.clear()
            raise
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
            cgroup=str(enclosure.cgroup or ""),
            scratch=str(enclosure.scratch or ""),
            address_space_bytes=int(env.limits.address_space or 0),
        )
        self._running[order.server] = _Running(record, popen)
        self._remember_log(record)
        return record

    def _spawn(self, order: Launch, env: EnvSpec, *, log_file: Path, enclosure: Enclosure) -> subprocess.Popen[bytes]:
        command = [*serve_program(env), "serve", *self._options(env)]
        with _new_file(log_file, mask=env.file_mask or 0) as log:
            return spawn_group(
                confined(command, env, cgroup=enclosure.cgroup, scratch=enclosure.scratch),
                lifeline=self._lifeline,
                env=self._environ(order, env, enclosure.scratch),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def adopt(self, record: Record) -> bool:
        """Take over a process of an earlier controller; False if it is not there any more.

        Raises:
            UsageError: It is there, but this process has no right to end it.
        """
        if not _is_same_process(record):
            return False
        try:
            os.kill(record.pid, 0)
        except PermissionError:
            raise UsageError(
                f"server {record.server[:8]} of env {record.env} (process {record.pid}) runs as a user whose processes "
                f"user {os.geteuid()} must not end; run the controller as root, or end that server first"
            ) from None
        except ProcessLookupError:
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
            running.record.enclosure.kill()

    def ended(self) -> list[Ended]:
        """The processes that ended since the last call; their remains are killed."""
        found = [(running, how) for running in self._running.values() if (how := self._how(running)) is not None]
        for running, _ in found:
            del self._running[running.record.server]
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(running.record.pid, signal.SIGKILL)
        return [_ended(running.record, how) for running, how in found]

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
        for pattern in (*env.allow_urls, *self._allow_urls):
            options += ["--allow-url", pattern]
        options += ["--model-proxy"] if env.model_proxy else []
        for folder in env.env_dir_path:
            options += ["--env-dir-path", str(folder)]
        return [*options, "--", env.id]

    def _environ(self, order: Launch, env: EnvSpec, scratch: Path | None) -> dict[str, str]:
        environ = {**variables_for(env, scratch), **self._variables, **env.variables, "PYTHONUNBUFFERED": "1"}
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


def clear_remains(record: Record) -> tuple[int, list[str]]:
    """Kill what a server that has ended has left, and clear away what was made for it. Takes a while.

    Returns:
        How many processes were killed that carried its mark, and what could not be cleared away.
    """
    record.enclosure.kill()
    return kill_marked({record.server}), record.enclosure.clear()


def _new_file(path: Path, *, mask: int) -> IO[bytes]:
    path.parent.mkdir(mode=0o777 & ~mask, parents=True, exist_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 & ~mask), "wb")


def _ended(record: Record, how: str) -> Ended:
    lines = tuple(tail(record.log_file, QUOTED_LINES))
    cause = record.enclosure.memory_kills()
    if not cause and record.address_space_bytes and any(_NO_MEMORY.search(line) for line in lines):
        cause = f"out of memory: limits.address_space is {record.address_space_bytes:,} bytes"
    return Ended(record, how, lines, cause)


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
