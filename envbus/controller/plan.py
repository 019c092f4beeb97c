"""What a fleet file amounts to, for a dry run; there is no secret in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from envbus.controller.confinement import serve_program, unset_variables, wants_group
from envbus.controller.controller_bus import bus_options
from envbus.controller.host_checks import check_host
from envbus.controller.spec import EnvSpec, FleetSpec


def plan_of(spec: FleetSpec) -> dict[str, Any]:
    """Return the plan as JSON values.

    Raises:
        UsageError: The address of NATS is of no use, or this host cannot isolate the servers as wanted.
    """
    check_host(spec)
    options = bus_options(spec)
    return {
        "controller": spec.controller_id,
        "bus": "a NATS server of its own" if options is None else options.describe(),
        "prefix": spec.bus.prefix,
        "log_dir": str(spec.controller.log_dir),
        "adopt": spec.controller.adopt,
        "envs": [_env_plan(env, spec.controller.cgroup) for env in spec.env],
    }


def _env_plan(env: EnvSpec, cgroup: Path | None) -> dict[str, Any]:
    scale = env.autoscale
    return {
        "env": env.bus_name,
        "env_id": env.id,
        "args": env.args,
        "servers": str(env.replicas) if scale is None else f"{scale.min} to {scale.max}",
        "max_concurrent": env.max_concurrent,
        "command": [*serve_program(env), "serve", env.id],
        "variables": sorted(env.variables),
        "isolation": list(_isolation(env, cgroup)),
    }


def _isolation(env: EnvSpec, cgroup: Path | None) -> Iterator[str]:
    if env.user is not None:
        yield f"user {env.user}" + (f", groups {', '.join(env.groups)}" if env.groups is not None else "")
    if env.inherit is not None:
        unset = unset_variables(env)
        yield f"inherits only {', '.join(env.inherit) or 'nothing'}"
        if unset:
            yield f"not set here: {', '.join(unset)}"
    if env.cwd is not None:
        yield f"in {env.cwd}"
    if env.private_tmp:
        yield "a private temporary folder"
    if env.file_mask is not None:
        yield f"umask {env.file_mask:03o}"
    if env.no_new_privs:
        yield "no new privileges"
    if wants_group(env, cgroup):
        yield "a cgroup for each server"
    for key in sorted(env.limits.model_fields_set):
        value = getattr(env.limits, key)
        shown = value.human_readable() if isinstance(value, ByteSize) else value
        yield f"{key.replace('_', ' ')} at most {shown}"
