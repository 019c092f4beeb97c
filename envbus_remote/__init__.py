"""An env on the bus as an environment module for the tools of verifiers 0.1.x: ``vf-eval envbus-remote -a '{…}'``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envbus.adapters.verifiers.remote_env import RemoteEnvironment

__all__ = ["load_environment"]


def load_environment(
    env: str | None = None,
    address: str | list[str] | None = None,
    name: str | None = None,
    env_args: Mapping[str, Any] | None = None,
    prefix: str = "env",
    fingerprint: str | None = None,
    priority: int = 0,
    timeout_s: float | None = None,
) -> RemoteEnvironment:
    """Connect to an env on the bus; its package is not needed here.

    Args:
        env: The environment, as its servers were given it.
        address: NATS address(es); default ENVBUS_URL, NATS_URL, then the NATS CLI's context.
        name: Its name on the bus, if the servers were given one.
        env_args: The arguments that its servers were given.
        prefix: First token of all subjects.
        fingerprint: Run only on servers with this fingerprint.
        priority: Place in the servers' waiting lines; higher goes first.
        timeout_s: Limit for each call.

    Raises:
        NoServerError: No server of the env is there.
    """
    from envbus.adapters.verifiers.attach import bus_env_client
    from envbus.adapters.verifiers.remote_env import RemoteEnvironment
    from envbus.client import NATSEnvClient

    which: dict[str, Any] = {"env_args": env_args, "name": name, "prefix": prefix}
    fleet = bus_env_client(address, env, fingerprint=fingerprint, priority=priority, timeout_s=timeout_s, **which)
    return RemoteEnvironment(lambda: NATSEnvClient(address, env, **which), fleet)
