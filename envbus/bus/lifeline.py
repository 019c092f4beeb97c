"""Processes that end when the process that started them ends, however that happened.

The parent holds the write end of a pipe and the child waits for its end: the kernel
closes it even on SIGKILL and whichever thread started the child. Children lead a
session of their own, so that what they start can be killed with them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

LIFELINE_FD_VAR = "ENVBUS_LIFELINE_FD"
"""Environment variable that tells a child the number of its lifeline's descriptor."""


class Lifeline:
    """The parent's side: the child sees end of file when this process ends or calls close()."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        _open_lifelines.add(self)

    def send(self, text: str) -> None:
        """Write to the child; nothing happens if it is gone or the lifeline is closed."""
        if self in _open_lifelines:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._write_fd, text.encode())

    def close_read_end(self) -> None:
        """Drop this process's copy of the read end; call it when the last child is started."""
        if self.read_fd >= 0:
            os.close(self.read_fd)
            self.read_fd = -1

    def close(self) -> None:
        """Let the children know that they shall end."""
        self.close_read_end()
        self._close_write_end()

    def _close_write_end(self) -> None:
        if self in _open_lifelines:
            _open_lifelines.discard(self)
            os.close(self._write_fd)


_open_lifelines: set[Lifeline] = set()


def _forget_after_fork() -> None:
    # A forked child (multiprocessing's default on Linux before 3.14) would hold every write end
    # open and so keep its parent's other children alive after the parent's death.
    for lifeline in list(_open_lifelines):
        lifeline._close_write_end()


os.register_at_fork(after_in_child=_forget_after_fork)


def inherited_lifeline() -> int | None:
    """Return the descriptor that the parent passed to this process, once.

    The variable is removed, so this process's own children do not take it for theirs.
    """
    text = os.environ.pop(LIFELINE_FD_VAR, "")
    return int(text) if text.isdecimal() else None


def watch_lifeline(fd: int, on_parent_gone: Callable[[], None], *, hard_exit_after_s: float) -> threading.Thread:
    """Wait in a daemon thread for the end of the parent.

    Args:
        fd: Read end of the parent's lifeline.
        on_parent_gone: Called in that thread; begins an orderly end and returns.
        hard_exit_after_s: This process and its descendants are killed this long after the parent's
            end, whatever the callback or the main thread does.
    """
    os.set_inheritable(fd, False)
    thread = threading.Thread(
        target=_watch, args=(fd, on_parent_gone, hard_exit_after_s), name="envbus-lifeline", daemon=True
    )
    thread.start()
    return thread


def _watch(fd: int, on_parent_gone: Callable[[], None], hard_exit_after_s: float) -> None:
    while os.read(fd, 512):
        pass
    timer = threading.Timer(hard_exit_after_s, _exit_hard)
    timer.daemon = True
    timer.start()
    on_parent_gone()


def _exit_hard() -> None:
    _kill_all(_descendants(os.getpid()))
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def spawn_group(
    args: Sequence[str | Path],
    *,
    lifeline: Lifeline | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that leads a session of its own: the terminal's Ctrl-C does not reach it.

    Args:
        args: Program and arguments.
        lifeline: Passed on; the child finds it with inherited_lifeline().
        env: The child's environment; None: this process's.
        cwd: Its working directory.
        stdout: As for subprocess.Popen.
        stderr: As for subprocess.Popen.
    """
    child_env = dict(os.environ if env is None else env)
    if lifeline is not None:
        child_env[LIFELINE_FD_VAR] = str(lifeline.read_fd)
    return subprocess.Popen(
        [os.fspath(arg) for arg in args],
        env=child_env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=() if lifeline is None else (lifeline.read_fd,),
        start_new_session=True,
    )


def kill_group(leader_pid: int) -> None:
    """Kill a process of spawn_group and everything that it started.

    Descendants that made a session of their own are found as long as the processes between
    still live. The caller waits for the leader, so that no zombie stays.
    """
    strays = _descendants(leader_pid)
    # macOS reports a group that has only zombies left as PermissionError.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader_pid, signal.SIGKILL)
    _kill_all(strays)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        children: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return children


def _kill_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
