"""Checks that this host can isolate servers as a fleet file wants, before anything is started; changes nothing.

Nothing is ignored: what cannot be had is a UsageError with file, line, key and remedy. A process that
becomes what a server will be, and then only looks around, finds most of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import envbus
from envbus.bus.address import resolve_bus_options
from envbus.controller.cgroups import check_folder, find_folder
from envbus.controller.confinement import (
    account_of,
    confines,
    launch_command,
    plan_for,
    serve_program,
    variables_for,
    wants_group,
)
from envbus.controller.launcher import Plan
from envbus.controller.spec import EnvSpec, FleetSpec
from envbus.environments.server_process import own_import_paths
from envbus.errors import UsageError

REHEARSAL_TIMEOUT_S = 30.0
_CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "KILL": 5, "SETGID": 6, "SETUID": 7, "SYS_PTRACE": 19}
_REMEDIES = {
    "user": "; install envbus and its Python where that user may read them, or give a python that it may run",
    "python": "; install it where the servers' user may read it",
    "env_dir_path": "; give the servers' user the right to read it",
    "bus": "; give [bus] server_context as the path of a context that the servers' user may read, with its files",
    "cwd": "; make the folder, and give the servers' user the right to enter it",
    "private_tmp": "; set TMPDIR for the controller to a folder that the servers' user may enter",
}
_Where = tuple[str | int, ...]


class _ImpossibleError(Exception):
    """What this host does not let a server have."""

    def __init__(self, where: str, text: str) -> None:
        super().__init__(text)
        self.where = where


def check_host(spec: FleetSpec) -> None:
    """Check that this host can do what the fleet file wants; nothing is started or changed.

    Raises:
        UsageError: With all that it cannot do, a line each.
    """
    problems = [f"{spec.place(where)}{text}" for where, text in _problems(spec)]
    if problems:
        raise UsageError("\n    ".join(problems))


def _problems(spec: FleetSpec) -> Iterator[tuple[_Where, str]]:
    if spec.controller.cgroup is not None:
        try:
            check_folder(spec.controller.cgroup, {})
        except UsageError as error:
            yield ("controller", "cgroup"), str(error)
            return
    for number, env in enumerate(spec.env):
        try:
            _check(env, spec.controller.cgroup, context=_servers_context(spec))
        except _ImpossibleError as problem:
            is_of_bus = problem.where == "bus"
            yield ("bus",) if is_of_bus else ("env", number, *problem.where.split(".")), str(problem)


def _check(env: EnvSpec, spec_cgroup: Path | None, *, context: str | None) -> None:
    if env.no_new_privs and sys.platform != "linux":
        raise _ImpossibleError("no_new_privs", "only Linux has it")
    if needed := env.limits.cgroup_controllers:
        with _naming(f"limits.{next(iter(needed.values()))}"):
            check_folder(find_folder(spec_cgroup), needed)
    with _naming("user" if env.groups is None else "groups"):
        account, plan = account_of(env), plan_for(env, cgroup=None, scratch=None)
    if plan["uid"] is not None:
        _check_rights(env, has_group=wants_group(env, spec_cgroup))
        if context is not None and not context.endswith(".json"):
            text = f"the servers' user does not have the NATS CLI context {context!r} of this one"
            raise _ImpossibleError("bus", text + _REMEDIES["bus"])
    if env.limits.user_processes is not None and (os.geteuid() if account is None else account.uid) == 0:
        raise _ImpossibleError("limits.user_processes", "root is not bound by it; give user, or limits.processes")
    if confines(plan):
        _rehearse(env, plan | {"readable": [*_readable(env), ("bus", _bus_files(context))]})


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise _ImpossibleError(where, str(error)) from error


def _check_rights(env: EnvSpec, *, has_group: bool) -> None:
    wanted = {"KILL", "SETGID", "SETUID"} | ({"CHOWN", "DAC_OVERRIDE", "FOWNER"} if env.private_tmp else set())
    if not has_group:
        wanted.add("SYS_PTRACE")  # to find what a server leaves behind, by its mark
    missing = sorted(wanted - _own_capabilities())
    if missing:
        names = " ".join(f"CAP_{name}" for name in missing)
        text = f"user {os.geteuid()} must not run servers as others: run the controller as root, with {names}"
        raise _ImpossibleError("user", text)


def _own_capabilities() -> set[str]:
    try:
        found = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        found = None
    held = int(found[1], 16) if found else (-1 if os.geteuid() == 0 else 0)
    return {name for name, bit in _CAPABILITIES.items() if held >> bit & 1}


def _rehearse(env: EnvSpec, plan: Plan) -> None:
    """Let a process become what a server will be, and try."""
    try:
        done = subprocess.run(
            [*launch_command("rehearse", plan), *serve_program(env)],
            env={**variables_for(env, None), **env.variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=REHEARSAL_TIMEOUT_S,
        )
        answer = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        said = done.stderr.strip()[-300:] if isinstance(error, ValueError) else str(error)
        raise _ImpossibleError(
            "limits", f"not even a process that only looks around can run with these: {said}"
        ) from None
    if answer:
        key, why = answer
        raise _ImpossibleError(key, f"{why}{_REMEDIES.get(key, '')}")


def _readable(env: EnvSpec) -> list[tuple[str, list[str]]]:
    own = [str(Path(envbus.__file__).parent), *own_import_paths()[0]] if not (env.python or env.command) else []
    above_scratch = [tempfile.gettempdir()] if env.private_tmp else []
    folders = [str(folder) for folder in env.env_dir_path]
    return [("user", own), ("env_dir_path", folders), ("private_tmp", above_scratch)]


def _servers_context(spec: FleetSpec) -> str | None:
    """The context that servers connect with; None: they are given an address."""
    named = spec.bus.server_context or spec.bus.context
    if named or spec.bus.address or spec.bus.embedded or os.environ.get("ENVBUS_URL") or os.environ.get("NATS_URL"):
        return named
    return os.environ.get("ENVBUS_CONTEXT")


def _bus_files(context: str | None) -> list[str]:
    """What a server reads to connect."""
    if context is None or not context.endswith(".json"):
        return []
    options = resolve_bus_options(context=context)
    files = (
        options.creds_file,
        options.nkey_seed_file,
        options.tls_ca_file,
        options.tls_cert_file,
        options.tls_key_file,
    )
    return [context, *(str(file) for file in files if file is not None)]
