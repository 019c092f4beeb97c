"""Server processes of the stage environment, forked from one process that has imported everything.

Run as a program this file is that one process. What it starts are children of the test's process, as if that had
started them: it only spares them the start of Python and the imports.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PR_SET_CHILD_SUBREAPER = 36
ANSWER_S = 60.0


class ForkedProcess:
    """A child of this process, with what the tests use of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pid_fd = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
                    os.close(self._pid_fd)
            return self.returncode

    def wait(self, timeout: float) -> int:
        if self.poll() is None:
            select.select([self._pid_fd], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"server process {self.pid}", timeout)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class ServerForks:
    """Starts the process that forks, and has it start servers."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(ANSWER_S)
        with theirs:
            environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE / "e2e"), str(HERE.parent)])}
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environ
            )
        self.pid = self._process.pid

    def launch(self, spec: dict[str, Any], *, lifeline_fd: int, log_fd: int) -> ForkedProcess:
        """Start a server that runs as the specification says and writes into the log."""
        request = json.dumps({"spec": spec, "environ": dict(os.environ), "folder": os.getcwd()}).encode()
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._socket, [len(request).to_bytes(4, "big")], [lifeline_fd, log_fd])
            self._socket.sendall(request)
            answer = self._socket.recv(4, socket.MSG_WAITALL)
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return ForkedProcess(int.from_bytes(answer, "big"))

    def close(self) -> None:
        self._socket.close()
        self._process.wait(20)


@functools.cache
def server_forks() -> ServerForks:
    """This process's; it is started when the first server is."""
    return ServerForks()


def started() -> list[ServerForks]:
    """What close() is due to."""
    return [server_forks()] if server_forks.cache_info().currsize else []


def serve(connection: socket.socket) -> None:
    """Start what is asked for until the other end is closed."""
    import stage_env  # noqa: F401 - so that the forks need not

    import envbus.server  # noqa: F401

    gc.freeze()  # so that the forks share it
    while True:
        size, fds, _, _ = socket.recv_fds(connection, 4, 2)
        if not size:
            return
        request = json.loads(connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
        connection.sendall(orphan(request, *fds).to_bytes(4, "big"))
        for fd in fds:
            os.close(fd)


def orphan(request: dict[str, Any], lifeline_fd: int, log_fd: int) -> int:
    """Fork a process whose parent ends at once: the test's process, which asked for that, becomes its parent."""
    read_fd, write_fd = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            become(request, lifeline_fd, log_fd)
        os.write(write_fd, pid.to_bytes(4, "big"))
        os._exit(0)
    os.waitpid(between, 0)
    pid = int.from_bytes(os.read(read_fd, 4), "big")
    os.close(read_fd)
    os.close(write_fd)
    return pid


def become(request: dict[str, Any], lifeline_fd: int, log_fd: int) -> None:
    """Turn this fork into a server; does not return."""
    from envbus import NATSEnvServer, ServerSettings

    os.setsid()
    for fd, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log_fd, 1), (log_fd, 2)):
        os.dup2(fd, target)
    kept = {0, 1, 2, lifeline_fd}
    for fd in (int(name) for name in os.listdir("/proc/self/fd")):
        if fd not in kept:
            with contextlib.suppress(OSError):  # the folder itself, which is closed
                os.close(fd)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    code = 1
    try:
        spec = request["spec"]
        settings = ServerSettings(**spec.pop("settings"))
        NATSEnvServer.run_server(**spec, settings=settings, lifeline_fd=lifeline_fd)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the end of a process
        traceback.print_exc()
    finally:
        # The end of an interpreter without the tidying up of its memory, which would copy all that is shared.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
