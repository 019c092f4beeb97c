"""How a server is started as its fleet file isolates it: as whom, with which variables, by which command."""

from __future__ import annotations

import grp
import json
import os
import pwd
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envbus.controller import launcher
from envbus.controller.isolation import Isolation
from envbus.controller.spec import EnvSpec
from envbus.errors import UsageError

BUS_VARIABLES = ("ENVBUS_URL", "NATS_URL", "ENVBUS_CONTEXT", "XDG_CONFIG_HOME")
"""How a server finds its bus."""
_SETTINGS_PREFIX = "ENVBUS_SERVER_"


@dataclass(frozen=True, slots=True)
class Account:
    """Whom a server runs as."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


def account_of(isolation: Isolation) -> Account | None:
    """Return whom to become; None: nobody else.

    Raises:
        UsageError: There is no such user or group.
    """
    if isolation.user is None:
        return None
    try:
        text = isolation.user
        entry = pwd.getpwuid(int(text)) if text.isdecimal() else pwd.getpwnam(text)
    except (KeyError, OverflowError):
        raise UsageError(
            f"this host has no user {isolation.user!r}; make it (useradd --system {isolation.user}) or name another"
        ) from None
    if isolation.groups is None:
        groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    else:
        groups = tuple(_gid(name) for name in isolation.groups)
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)


def _gid(name: str) -> int:
    try:
        return (grp.getgrgid(int(name)) if name.isdecimal() else grp.getgrnam(name)).gr_gid
    except (KeyError, OverflowError):
        raise UsageError(f"this host has no group {name!r}; make it (groupadd --system {name}) or drop it") from None


def serve_program(env: EnvSpec) -> list[str]:
    """The program that ``serve`` and its options are given to."""
    # -P: the folder where the operator happens to be is no place to import from.
    return env.command or [env.python or sys.executable, "-P", "-m", "envbus"]


def confined(command: Sequence[str], env: EnvSpec, *, cgroup: Path | None, scratch: Path | None) -> list[str]:
    """Return the command as it is started: as it is, or by the launcher if there is anything to confine.

    Raises:
        UsageError: The user or a group is not there any more.
    """
    plan = plan_for(env, cgroup=cgroup, scratch=scratch)
    return [*launch_command("run", plan), *command] if confines(plan) else list(command)


def variables_for(env: EnvSpec, scratch: Path | None) -> dict[str, str]:
    """Return which of the controller's variables a server gets, and those that its user and folders need."""
    variables = dict(os.environ)
    if env.inherit is not None:
        kept = {*env.inherit, *BUS_VARIABLES}
        variables = {
            name: value for name, value in variables.items() if name in kept or name.startswith(_SETTINGS_PREFIX)
        }
    if (account := account_of(env)) is not None:
        variables |= {"HOME": account.home, "USER": account.name, "LOGNAME": account.name}
    if scratch is not None:
        variables["TMPDIR"] = str(scratch)
    return variables


def unset_variables(env: EnvSpec) -> list[str]:
    """Which variables it shall inherit that this process does not have."""
    return [name for name in env.inherit or [] if name not in os.environ]


def wants_group(env: EnvSpec, spec_cgroup: Path | None) -> bool:
    """Whether its servers each get a cgroup."""
    return spec_cgroup is not None or bool(env.limits.cgroup_controllers)


def plan_for(env: EnvSpec, *, cgroup: Path | None, scratch: Path | None) -> launcher.Plan:
    """Return what the launcher is told.

    Raises:
        UsageError: The user or a group is not there.
    """
    account = account_of(env)
    if account is not None and account.uid == os.geteuid() and env.groups is None:
        account = None  # nobody else, and no right is needed for that
    cwd = env.cwd or scratch
    return {
        "cgroup": str(cgroup) if cgroup is not None else None,
        "rlimits": env.limits.rlimits,
        "umask": env.file_mask,
        "uid": account.uid if account is not None else None,
        "gid": account.gid if account is not None else None,
        "groups": account.groups if account is not None else None,
        "no_new_privs": env.no_new_privs,
        "cwd": str(cwd) if cwd is not None else None,
        "program_key": "command" if env.command else "python" if env.python else "user",
    }


def confines(plan: launcher.Plan) -> bool:
    """Whether there is anything to do for the launcher."""
    given = (plan[key] is not None for key in ("cgroup", "umask", "uid", "cwd"))
    return any(given) or bool(plan["rlimits"]) or bool(plan["no_new_privs"])


def launch_command(mode: str, plan: launcher.Plan) -> list[str]:
    """What a program and its arguments are appended to."""
    return [sys.executable, "-I", "-S", launcher.__file__, mode, json.dumps(plan)]
