"""What a server hosts: an environment as it is, or through the adapter for the library that it is made for.

The library is found by the environment's classes: nothing is imported that the environment did not import itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from envbus.adapters.verifiers.classic import ClassicHost, is_classic
from envbus.environments.loader import load_with

_TASKSET = ("verifiers.v1.taskset", "Taskset")
_TASKSETS_OF_THE_LIBRARY = "verifiers.v1.tasksets"


def load_hosted(
    env_id: str, env_args: Mapping[str, Any], *, max_concurrent: int | None = None, model_proxy: bool = True
) -> Any:
    """Load an environment, or a taskset; in the main thread, with the event loop running.

    A module with a ``load_environment`` is no taskset, whatever else it exports.

    Args:
        env_id: As for load_environment; also the id of a taskset of verifiers 0.4.
        env_args: As for load_environment; for a taskset the fields of its environment's config.
        max_concurrent: Rollouts at once; sizes the thread pools of libraries that have some. None leaves them alone.
        model_proxy: Whether a library's own model clients use the proxies that the environment names.

    Returns:
        What load_environment returned, or its adapter.

    Raises:
        EnvironmentLoadError: As load_environment raises.
    """
    loaded = load_with(
        env_id,
        env_args,
        typed=_typed_arguments,
        otherwise=partial(_taskset_loader, env_id, model_proxy),
        namespaces=[_TASKSETS_OF_THE_LIBRARY],
    )
    environment = hosted(loaded)
    if max_concurrent is not None and callable(set_concurrency := getattr(environment, "set_concurrency", None)):
        set_concurrency(max_concurrent)
    return environment


def hosted(environment: Any) -> Any:
    """An environment with the hosting protocol: the adapter of one that is made for another library."""
    return ClassicHost(environment) if is_classic(environment) else environment


def _taskset_loader(env_id: str, model_proxy: bool, module: ModuleType) -> Callable[..., Any] | None:
    """What loads the taskset that a module exports (by ``__all__``, as the library wants it), or None."""
    exported = [getattr(module, name, None) for name in getattr(module, "__all__", ())]
    if not any(isinstance(each, type) and _has_base(each, _TASKSET) for each in exported):
        return None

    def load(**env_args: Any) -> Any:
        from envbus.adapters.verifiers.taskset_loading import load_taskset

        return load_taskset(env_id, env_args, model_proxy=model_proxy)

    return load


def _has_base(kind: type, name: tuple[str, str]) -> bool:
    return any((each.__module__, each.__qualname__) == name for each in kind.__mro__)


def _typed_arguments(load: Callable[..., Any], env_args: dict[str, Any]) -> dict[str, Any]:
    """The arguments as the environment's library hands them to load_environment: a config map as an object."""
    library = sys.modules.get("verifiers.utils.env_utils")
    coerce = getattr(library, "coerce_typed_env_config", None)
    if coerce is None:
        return env_args
    typed: dict[str, Any] = coerce(load, inspect.signature(load), env_args)
    return typed
