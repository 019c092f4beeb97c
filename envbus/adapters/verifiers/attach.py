"""attach: an environment of verifiers 0.1.x that is loaded here runs its rollouts on the fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from envbus.bus.address import BusOptions, resolve_bus_options
from envbus.bus.subjects import DEFAULT_PREFIX
from envbus.client import NATSEnvClient
from envbus.errors import UsageError
from envbus.settings import ClientSettings

if TYPE_CHECKING:
    from envbus.adapters.verifiers.remote_client import BusEnvClient

Address = str | Sequence[str] | BusOptions | None


def attach(
    env: Any,
    address: Address = None,
    name: str | None = None,
    *,
    env_id: str | None = None,
    env_args: Mapping[str, Any] | None = None,
    **client_settings: Any,
) -> BusEnvClient:
    """Send an environment's rollouts to its servers on the bus: evaluate, generate, run_rollout and run_group.

    Nothing of the environment is changed but its ``env_client``. Datasets stay local.

    Args:
        env: What ``verifiers.load_environment`` returned.
        address: NATS address(es); default as for NATSEnvClient.
        name: Its name on the bus, if the servers were given one.
        env_id: Its id where it is served; default its own.
        env_args: Its arguments where it is served; default its own.
        **client_settings: Further arguments of NATSEnvClient: prefix, fingerprint, priority, timeout_s, settings.

    Returns:
        The client, which is ``env.env_client`` now; close it, or call ``env.stop_server()``, at the end.

    Raises:
        UsageError: The environment has a server already, or no id and no name was given.
    """
    if getattr(env, "env_client", None) is not None:
        raise UsageError("this environment has an env_client already: await env.stop_server() first")
    client = bus_env_client(
        address,
        env_id or getattr(env, "env_id", None) or None,
        env_args=getattr(env, "env_args", None) if env_args is None else env_args,
        name=name,
        **client_settings,
    )
    env.env_client = client
    return client


def bus_env_client(
    address: Address,
    env_id: str | None,
    *,
    env_args: Mapping[str, Any] | None = None,
    name: str | None = None,
    prefix: str = DEFAULT_PREFIX,
    settings: ClientSettings | None = None,
    **client_settings: Any,
) -> BusEnvClient:
    """The library's EnvClient for an env on the bus; it connects when it is first used.

    Args:
        address: As for NATSEnvClient, and so are the others.
        env_id: Where ``env_args`` are given: the name on the bus depends on both.
        env_args: The arguments that the servers were given.
        name: The env's name on the bus, if the servers were given one.
        prefix: First token of all subjects.
        settings: Time limits and sizes.
        **client_settings: fingerprint, priority, timeout_s.

    Raises:
        UsageError: No such version of the library is installed.
    """
    try:
        from envbus.adapters.verifiers.remote_client import BusEnvClient
    except ImportError as error:
        raise UsageError(f"this needs verifiers 0.1.14, or one near it with verifiers.serve: {error}") from error

    options, settings = resolve_bus_options(address), settings or ClientSettings()
    remote = NATSEnvClient(
        options, env_id, env_args=env_args, name=name, prefix=prefix, settings=settings, **client_settings
    )
    return BusEnvClient(remote, address=options.describe(), settings=settings)
