"""What a fleet file amounts to, for a dry run; there is no secret in it."""

from __future__ import annotations

from typing import Any

from envbus.bus.address import find_bus_options
from envbus.controller.processes import serve_program
from envbus.controller.spec import EnvSpec, FleetSpec


def plan_of(spec: FleetSpec) -> dict[str, Any]:
    """Return the plan as JSON values.

    Raises:
        UsageError: The address of NATS is of no use.
    """
    options = None if spec.bus.embedded else find_bus_options(spec.bus.address)
    return {
        "controller": spec.controller_id,
        "bus": "a NATS server of its own" if options is None else options.describe(),
        "prefix": spec.bus.prefix,
        "log_dir": str(spec.controller.log_dir),
        "adopt": spec.controller.adopt,
        "envs": [_env_plan(env) for env in spec.env],
    }


def _env_plan(env: EnvSpec) -> dict[str, Any]:
    scale = env.autoscale
    return {
        "env": env.bus_name,
        "env_id": env.id,
        "args": env.args,
        "servers": str(env.replicas) if scale is None else f"{scale.min} to {scale.max}",
        "max_concurrent": env.max_concurrent,
        "command": [*serve_program(env), "serve", env.id],
        "variables": sorted(env.variables),
    }
