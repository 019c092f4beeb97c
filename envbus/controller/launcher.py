"""Confines its own process and becomes the program: a script that needs nothing but the standard library.

Between fork and exec of a controller with threads no code of ours may run; here there is one thread. With ``rehearse``
it becomes nothing: it says, in JSON, which key of the plan cannot be had.
"""

from __future__ import annotations

import ctypes  # here, as all: the user that it becomes may have no right to read this Python's library
import functools
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable
from typing import Any

REFUSED_EXIT_CODE = 126
_RLIMITS = {"address_space": "RLIMIT_AS", "open_files": "RLIMIT_NOFILE", "user_processes": "RLIMIT_NPROC"}
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
Plan = dict[str, Any]


class RefusedError(Exception):
    """A step that cannot be done; the key of the fleet file, and why."""

    def __init__(self, key: str, why: object) -> None:
        super().__init__(f"{key}: {why}")
        self.key = key
        self.why = str(why)


def confine(plan: Plan) -> None:
    """Take all steps of the plan, those that need rights first.

    Raises:
        RefusedError: One cannot be done.
    """
    _step("cgroup", lambda: _join(plan["cgroup"]))
    for key, value in plan["rlimits"].items():
        _step(f"limits.{key}", functools.partial(_limit, key, value))
    if plan["umask"] is not None:
        os.umask(plan["umask"])
    if plan["uid"] is not None:
        _step("user", lambda: _become(plan))
    if plan["no_new_privs"]:
        _step("no_new_privs", lambda: _prctl(_PR_SET_NO_NEW_PRIVS, 1))
    if plan["cwd"] is not None:
        _step("cwd", lambda: os.chdir(plan["cwd"]))


def check(plan: Plan, program: str) -> None:
    """Raise RefusedError if this process, confined, can not run the program or not read what it needs."""
    path = os.environ.get("PATH", os.defpath)
    if shutil.which(program, path=path) is None:
        raise RefusedError(plan["program_key"], f"{program} is not there, or must not be run by {_who()}")
    for key, files in plan["readable"]:
        for file in files:
            if not os.access(file, os.R_OK | (os.X_OK if os.path.isdir(file) else 0)):
                raise RefusedError(key, f"{file} must not be read by {_who()}, or is not there")


def _step(key: str, action: Callable[[], None]) -> None:
    try:
        action()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise RefusedError(key, f"{where}{error.strerror}") from error
    except ValueError as error:
        raise RefusedError(key, error) from error


def _join(cgroup: str | None) -> None:
    if cgroup is not None:
        with open(os.path.join(cgroup, "cgroup.procs"), "w") as procs:
            procs.write(str(os.getpid()))


def _limit(key: str, value: int) -> None:
    number = getattr(resource, _RLIMITS[key])
    hard = resource.getrlimit(number)[1]
    try:
        resource.setrlimit(number, (value, value))
    except (OSError, ValueError):
        raise ValueError(f"{value} is more than this host lets a controller without rights give: {hard}") from None


def _become(plan: Plan) -> None:
    os.setgroups(plan["groups"])
    os.setgid(plan["gid"])
    os.setuid(plan["uid"])
    if sys.platform == "linux":  # what a controller that is not root was lent for this
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = [ctypes.c_ulong(number) for number in (value, 0, 0, 0)]
    if libc.prctl(option, *arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _who() -> str:
    return f"user {os.getuid()}, group {os.getgid()}"


def main(arguments: list[str]) -> int:
    """Do what the arguments say: ``run`` or ``rehearse``, the plan, the program and its arguments."""
    mode, text, *command = arguments
    plan: Plan = json.loads(text)
    try:
        confine(plan)
        if mode == "rehearse":
            check(plan, command[0])
            sys.stdout.write("[]")
            return 0
        _step(plan["program_key"], lambda: os.execvp(command[0], command))
    except RefusedError as refused:
        if mode == "rehearse":
            sys.stdout.write(json.dumps([refused.key, refused.why]))
            return 0
        sys.stderr.write(f"error[usage]: it cannot be started as its fleet file says: {refused}\n")
    return REFUSED_EXIT_CODE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
