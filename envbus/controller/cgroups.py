"""A cgroup (v2) for each server, below a folder that is the controller's to use: limits, the end of all, the reason.

The folder is given by the operator, or systemd has delegated it. One group per server;
it is removed when nothing is left in it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from envbus.controller.isolation import Limits
from envbus.errors import UsageError

REMEDY = (
    "run the controller as a systemd service with Delegate=yes, or by: systemd-run --scope -p Delegate=yes "
    "envbus up …; or give a cgroup v2 folder that is its own as [controller] cgroup"
)
OWN_GROUP = "envbus-controller"
"""Where the controller itself goes if it is in the folder: a group with limits below must not have processes."""
EMPTY_TIMEOUT_S = 10.0
STALE_S = 60.0
"""An empty group of this age is one that a killed controller has left."""
_CPU_PERIOD_US = 100_000
_POLL_S = 0.02
_MOVES = 10


def find_folder(given: Path | None) -> Path:
    """Return the folder to make groups in: the given one, or that which systemd has delegated.

    Raises:
        UsageError: There is none.
    """
    if given is not None:
        return given
    own = own_group()
    # With DelegateSubgroup= the service's processes are in a group below the delegated one.
    for folder in (own, own.parent) if own is not None else ():
        if _is_delegated(folder):
            return folder
    raise UsageError(f"no cgroup v2 folder is delegated to this process; {REMEDY}")


def own_group() -> Path | None:
    """The group that this process is in; None without cgroup v2."""
    with contextlib.suppress(OSError):
        path = re.search(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
        mount = re.search(r"^\S+ \S+ \S+ / (\S+) .* - cgroup2 ", Path("/proc/self/mountinfo").read_text(), re.MULTILINE)
        if path and mount:
            return Path(mount[1]) / path[1]
    return None


def check_folder(folder: Path, needed: Mapping[str, str]) -> None:
    """Check, and change nothing.

    Args:
        folder: For groups.
        needed: Controllers, each with what it is needed for.

    Raises:
        UsageError: Groups with these controllers cannot be made in it.
    """
    try:
        there = (folder / "cgroup.controllers").read_text().split()
        procs = _procs(folder)
    except OSError as error:
        raise UsageError(f"{folder} is no cgroup v2 folder ({error.strerror}); {REMEDY}") from error
    missing = sorted(set(needed) - set(there))
    if missing:
        what = ", ".join(f"{name} (for limits.{needed[name]})" for name in missing)
        raise UsageError(f"{folder} has no controller {what}; it has: {', '.join(there) or 'none'}; {REMEDY}")
    closed = [name for name in (".", "cgroup.procs", "cgroup.subtree_control") if not os.access(folder / name, os.W_OK)]
    if closed:
        raise UsageError(f"{folder / closed[0]} must not be written by user {os.geteuid()}; {REMEDY}")
    if procs and not _is_root(folder) and os.getpid() not in procs:
        raise UsageError(f"{folder} has processes of others; a folder with limited groups must have none; {REMEDY}")
    if not _is_root(folder) and not (folder / "cgroup.kill").exists():
        raise UsageError(f"{folder} has no cgroup.kill: groups of servers need Linux 5.14 or later")
    _check_moves(folder)


class Cgroups:
    """The groups in one folder.

    Args:
        folder: Checked by check_folder().
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._enabled: set[str] = set()
        self._is_open = False

    def make(self, server: str, limits: Limits) -> Path:
        """Make the group of a server.

        Raises:
            OSError: The kernel does not allow it.
        """
        if not self._is_open:
            self._open()
        self._enable(set(limits.cgroup_controllers))
        group = self._folder / f"envbus-{server}"
        group.mkdir()
        try:
            for name, value in _settings(limits):
                (group / name).write_text(value)
        except OSError:
            remove(group, timeout_s=0)
            raise
        return group

    def _open(self) -> None:
        if not _is_root(self._folder):
            self._move_out()
        for group in self._folder.glob("envbus-" + "[0-9a-f]" * 32):
            with contextlib.suppress(OSError):  # the kernel refuses while a process is in it
                if time.time() - group.stat().st_ctime > STALE_S:
                    group.rmdir()
        self._is_open = True

    def _enable(self, controllers: set[str]) -> None:
        if new := controllers - self._enabled:
            (self._folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(new)))
            self._enabled |= new

    def _move_out(self) -> None:
        own = self._folder / OWN_GROUP
        for _ in range(_MOVES):  # those that are started meanwhile begin where their parent was
            procs = _procs(self._folder)
            if not procs:
                return
            own.mkdir(exist_ok=True)
            for pid in procs:
                with contextlib.suppress(ProcessLookupError):
                    (own / "cgroup.procs").write_text(str(pid))


def kill(group: Path) -> None:
    """Kill all that is in it, however well it hides. What cannot be killed shows when the group is removed."""
    with contextlib.suppress(OSError):
        (group / "cgroup.kill").write_text("1")


def remove(group: Path, *, timeout_s: float = EMPTY_TIMEOUT_S) -> bool:
    """Remove it, and the groups below it, when nothing is left in it; False if something stays. Takes a while."""
    deadline = time.monotonic() + timeout_s
    while True:
        for below in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
            with contextlib.suppress(OSError):
                below.rmdir()
        try:
            group.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True


def memory_kills(group: Path) -> tuple[int, int]:
    """How many processes of a group the kernel has killed for want of memory, and the bound in bytes (0: none)."""
    try:
        killed = re.search(r"^oom_kill (\d+)$", (group / "memory.events").read_text(), re.MULTILINE)
        bound = (group / "memory.max").read_text().strip()
    except OSError:
        return 0, 0
    return int(killed[1]) if killed else 0, int(bound) if bound.isdecimal() else 0


def _settings(limits: Limits) -> list[tuple[str, str]]:
    settings = []
    if limits.memory is not None:
        settings += [("memory.max", str(int(limits.memory))), ("memory.swap.max", str(int(limits.swap)))]
    if limits.cpus is not None:
        settings.append(("cpu.max", f"{round(limits.cpus * _CPU_PERIOD_US)} {_CPU_PERIOD_US}"))
    if limits.processes is not None:
        settings.append(("pids.max", str(limits.processes)))
    return settings


def _procs(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "cgroup.procs").read_text().split()]


def _is_root(folder: Path) -> bool:
    """Whether it is the root of all groups, which alone may have processes beside groups with limits."""
    return not (folder / "cgroup.type").exists()


def _is_delegated(folder: Path) -> bool:
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return False


def _check_moves(folder: Path) -> None:
    """A process may be moved by who may write to the group above both its old and its new one."""
    own = own_group()
    if own is None or own == folder or folder in own.parents:
        return
    common = Path(os.path.commonpath([own, folder]))
    if not os.access(common / "cgroup.procs", os.W_OK):
        raise UsageError(f"this process is in {own} and must not be moved to {folder}; {REMEDY}")
