"""Python children that end with their parent, and whole families that are killed at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from envbus.bus.lifeline import LIFELINE_FD_VAR, Lifeline, inherited_lifeline, kill_group, spawn_group, watch_lifeline

CHILD = """
import os, subprocess, sys, threading, time
from envbus.bus.lifeline import inherited_lifeline, watch_lifeline
fd = inherited_lifeline()
done = threading.Event()
def on_parent_gone():
    {on_parent_gone}
watch_lifeline(fd, on_parent_gone, hard_exit_after_s={hard_exit_after_s})
helper = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
stray = subprocess.Popen(["sleep", "60"], start_new_session=True)
print(os.getpid(), helper.pid, helper.stdout.readline().strip(), stray.pid, flush=True)
done.wait()
helper.kill(); stray.kill()
print("drained", flush=True)
"""
PARENT = """
import subprocess, sys, threading
from envbus.bus.lifeline import Lifeline, spawn_group
def start():
    lifelines.append(Lifeline())
    child = spawn_group([sys.executable, "-c", sys.argv[1]], lifeline=lifelines[0])
    lifelines[0].close_read_end()
lifelines = []
thread = threading.Thread(target=start)
thread.start()
thread.join()
sys.stdin.read()
"""

# Python 3.12+ warns of forks in a process with threads.
ALLOW_FORK = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


@pytest.fixture
def lifeline() -> Iterator[Lifeline]:
    lifeline = Lifeline()
    yield lifeline
    lifeline.close()


def child_code(*, on_parent_gone: str, hard_exit_after_s: float) -> str:
    return CHILD.format(on_parent_gone=on_parent_gone, hard_exit_after_s=hard_exit_after_s)


def read_family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    assert process.stdout is not None
    return [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]


def runs(process: psutil.Process) -> bool:
    """A zombie does not: it may stay for as long as its new parent likes."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(family: list[psutil.Process], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while alive := [process for process in family if runs(process)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.01)


def test_child_is_told_and_drains_when_its_parent_is_killed() -> None:
    """The child was started by a thread that has long ended."""
    code = child_code(on_parent_gone="done.set()", hard_exit_after_s=30)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    family = read_family(parent)
    assert all(process.is_running() for process in family)
    parent.kill()
    out, _ = parent.communicate(timeout=30)
    assert out == b"drained\n"
    wait_gone(family[:1])
    kill_group(family[0].pid)


@pytest.mark.parametrize("on_parent_gone", ["pass", "time.sleep(60)", "raise ValueError"])
def test_child_and_its_helpers_are_killed_if_it_does_not_end(on_parent_gone: str) -> None:
    """P46: also a helper that made its own session."""
    code = child_code(on_parent_gone=on_parent_gone, hard_exit_after_s=0.2)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    family = read_family(parent)
    parent.kill()
    parent.communicate(timeout=30)
    wait_gone(family)


def test_kill_group_leaves_no_descendant(lifeline: Lifeline) -> None:
    """P46: child of a child, and a helper with its own session."""
    code = child_code(on_parent_gone="pass", hard_exit_after_s=30)
    process = spawn_group([sys.executable, "-c", code], lifeline=lifeline, stdout=subprocess.PIPE)
    family = read_family(process)
    assert os.getsid(process.pid) == process.pid
    kill_group(process.pid)
    assert process.wait(timeout=20) == -9
    process.communicate()
    wait_gone(family)


def test_kill_group_reaches_helpers_of_a_dead_leader(lifeline: Lifeline) -> None:
    """P46: the server was killed with -9 before; its helpers share its session."""
    code = child_code(on_parent_gone="pass", hard_exit_after_s=30)
    process = spawn_group([sys.executable, "-c", code], lifeline=lifeline, stdout=subprocess.PIPE)
    family = read_family(process)
    process.kill()
    process.wait(timeout=20)
    assert all(helper.is_running() for helper in family[1:])
    kill_group(process.pid)
    assert process.stdout is not None
    process.stdout.close()
    wait_gone(family[:3])
    family[3].kill()
    kill_group(process.pid)


def test_closing_the_lifeline_is_the_parents_end_for_the_child(lifeline: Lifeline) -> None:
    told = threading.Event()
    fd = os.dup(lifeline.read_fd)
    thread = watch_lifeline(fd, told.set, hard_exit_after_s=3600)
    lifeline.send("words do not end it\n")
    assert not told.wait(0.05)
    lifeline.close()
    assert told.wait(20)
    thread.join(5)
    os.close(fd)


@ALLOW_FORK
def test_the_write_end_leaks_neither_into_commands_nor_into_forks(lifeline: Lifeline) -> None:
    read_fd = lifeline.read_fd
    command = subprocess.Popen(["sleep", "60"], close_fds=False)
    forked = os.fork()
    if forked == 0:
        time.sleep(60)
        os._exit(0)
    try:
        lifeline._close_write_end()
        assert os.read(read_fd, 1) == b""
    finally:
        command.kill()
        command.wait()
        os.kill(forked, 9)
        os.waitpid(forked, 0)


@ALLOW_FORK
def test_a_forked_copy_writes_nothing(lifeline: Lifeline) -> None:
    forked = os.fork()
    if forked == 0:
        lifeline.send("from the copy")
        lifeline.close()
        os._exit(0)
    assert os.waitpid(forked, 0)[1] == 0
    lifeline.send("mine")
    assert os.read(lifeline.read_fd, 100) == b"mine"


def test_lifeline_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIFELINE_FD_VAR, "7")
    assert inherited_lifeline() == 7
    assert inherited_lifeline() is None
    assert LIFELINE_FD_VAR not in os.environ


def test_sending_to_a_child_that_is_gone_is_no_error(lifeline: Lifeline) -> None:
    lifeline.close_read_end()
    lifeline.send("anyone?")
    lifeline.close()
    lifeline.close()
    lifeline.send("anyone?")
