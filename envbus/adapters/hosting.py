"""What a server hosts: an environment as it is, or through the adapter for the library that it is made for.

The library is found by the environment's classes: nothing is imported that the environment did not import itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from envbus.adapters.verifiers.classic import ClassicHost, is_classic
from envbus.environments.loader import load_with


def load_hosted(env_id: str, env_args: Mapping[str, Any], *, max_concurrent: int) -> Any:
    """Load an environment for a server of its own; in the main thread, with the event loop running.

    Args:
        env_id: As for load_environment.
        env_args: As for load_environment.
        max_concurrent: Rollouts at once; sizes the thread pools of libraries that have some.

    Returns:
        What load_environment returned, or its adapter.

    Raises:
        EnvironmentLoadError: As load_environment raises.
    """
    environment = hosted(load_with(env_id, env_args, typed=_typed_arguments))
    if callable(set_concurrency := getattr(environment, "set_concurrency", None)):
        set_concurrency(max_concurrent)
    return environment


def hosted(environment: Any) -> Any:
    """An environment with the hosting protocol: the adapter of one that is made for another library."""
    return ClassicHost(environment) if is_classic(environment) else environment


def _typed_arguments(load: Callable[..., Any], env_args: dict[str, Any]) -> dict[str, Any]:
    """The arguments as the environment's library hands them to load_environment: a config map as an object."""
    library = sys.modules.get("verifiers.utils.env_utils")
    coerce = getattr(library, "coerce_typed_env_config", None)
    if coerce is None:
        return env_args
    typed: dict[str, Any] = coerce(load, inspect.signature(load), env_args)
    return typed
