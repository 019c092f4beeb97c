"""Command lines of ``envbus`` that run to their end, each in a process forked from one that has imported everything.

Run as a program this file is that one process: it reads a JSON object per line and answers with one when a
command has ended. It skips only what every command line does alike, the start of Python and the imports.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

AT_ONCE = 4


class CliForks:
    """Starts the process that forks, and has it run commands."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._one_at_a_time = threading.Lock()

    def run(
        self, lines: Iterable[list[str]], *, folder: Path, environ: Mapping[str, str], timeout_s: float = 120
    ) -> list[tuple[int, str, str]]:
        """Run these argument lists, some at the same time; exit code, stdout and stderr of each."""
        request = {"lines": list(lines), "folder": str(folder), "environ": dict(environ), "timeout_s": timeout_s}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._one_at_a_time:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            done = json.loads(self._process.stdout.readline())
        return [(code, out, err) for code, out, err in done]

    def close(self) -> None:
        self._process.communicate(timeout=20)


class Ending:
    """One command that runs."""

    def __init__(self, pid: int, out: Any, err: Any, give_up_at: float) -> None:
        self.pid_fd = os.pidfd_open(pid)
        self._pid = pid
        self._written = (out, err)
        self._give_up_at = give_up_at

    def kill_if_late(self) -> None:
        if time.monotonic() > self._give_up_at:
            signal.pidfd_send_signal(self.pid_fd, signal.SIGKILL)

    def collect(self) -> list[Any]:
        """Exit code and what was written, once the process has ended."""
        _, status = os.waitpid(self._pid, 0)
        os.close(self.pid_fd)
        texts = []
        for file in self._written:
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
            file.close()
        return [os.waitstatus_to_exitcode(status), *texts]


def serve() -> None:
    """Answer requests until stdin ends."""
    import importlib
    import pkgutil

    import typer.main

    import envbus.cli
    import envbus.client
    import envbus.controller.operator
    import envbus.server
    from envbus.cli.main import app

    # So that the forks need not:
    for module in pkgutil.iter_modules(envbus.cli.__path__):
        importlib.import_module(f"envbus.cli.{module.name}")
    command = typer.main.get_command(app)
    gc.freeze()  # so that the forks share it
    for line in sys.stdin:
        print(json.dumps(run_all(command, **json.loads(line))), flush=True)


def run_all(
    command: Any, *, lines: list[list[str]], folder: str, environ: dict[str, str], timeout_s: float
) -> list[list[Any]]:
    running: dict[int, Ending] = {}
    ended: dict[int, list[Any]] = {}
    waiting = list(enumerate(lines))[::-1]
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            number, arguments = waiting.pop()
            out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - collect() closes them
            pid = os.fork()
            if pid == 0:
                become(command, arguments, folder, environ, (out.fileno(), err.fileno()))
            running[number] = Ending(pid, out, err, time.monotonic() + timeout_s)
        over, _, _ = select.select([each.pid_fd for each in running.values()], [], [], 0.5)
        for number, each in list(running.items()):
            each.kill_if_late()
            if each.pid_fd in over:
                ended[number] = running.pop(number).collect()
    return [ended[number] for number in range(len(lines))]


def become(command: Any, arguments: list[str], folder: str, environ: dict[str, str], written: tuple[int, int]) -> None:
    """Turn this fork into the process of a command; does not return."""
    from envbus.cli.main import run_app

    for fd, target in zip((os.open(os.devnull, os.O_RDWR), *written), (0, 1, 2), strict=True):
        os.dup2(fd, target)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    tempfile.tempdir = None
    sys.argv = ["envbus", *arguments]
    code = 1
    try:
        code = run_app(command, arguments, prog_name="envbus")
    except BaseException:  # noqa: BLE001 - the end of a process
        traceback.print_exc()
    finally:
        # The end of an interpreter without the tidying up of its memory, which would copy all that is shared.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
