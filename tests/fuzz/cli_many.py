"""Runs many command lines, each in a fork of this process, which has imported everything once.

Reads a JSON list of argument lists; prints a JSON list of ``[exit code, stderr]``.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import time
from typing import Any

LIMIT_S = 30.0


def main() -> None:
    import envbus.client
    import envbus.controller.operator
    import envbus.server  # noqa: F401 - so that the forks need not
    from envbus.cli.main import app, run_app

    def child(arguments: list[str], err: int) -> None:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.dup2(err, 2)
        code = 99
        try:
            code = run_app(app, arguments, prog_name="envbus")
        finally:
            sys.stderr.flush()
            os._exit(code)

    gc.freeze()  # so that the forks share it
    ended: list[Any] = []
    for arguments in json.load(sys.stdin):
        with tempfile.TemporaryFile() as err:
            pid = os.fork()
            if pid == 0:
                child(arguments, err.fileno())
            code = wait(pid)
            err.seek(0)
            ended.append([code, err.read().decode("utf-8", "replace")])
    json.dump(ended, sys.stdout)


def wait(pid: int) -> int:
    deadline = time.monotonic() + LIMIT_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -9
        time.sleep(0.005)


if __name__ == "__main__":
    main()
