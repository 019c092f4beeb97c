"""From a taskset's id and env_args to its host. Imports verifiers: import it only where that is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from verifiers.v1.configs.select import SelectConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from envbus.adapters.verifiers.taskset import TasksetHost
from envbus.adapters.verifiers.taskset_clients import use_our_transport
from envbus.errors import EnvArgsError, EnvironmentLoadError

SELECT = "select"
"""The one argument that is not the library's: which tasks are the eval set, a SelectConfig."""


def load_taskset(env_id: str, env_args: Mapping[str, Any], *, model_proxy: bool = True) -> TasksetHost:
    """Load the environment of a taskset.

    Args:
        env_id: The taskset's id.
        env_args: Fields of the environment's config (``taskset``, ``agent``, ``id``, ``retries`` ...), and ``select``.
        model_proxy: Whether its model clients use the proxies that the environment names.

    Raises:
        EnvArgsError: They are not such fields.
        EnvironmentLoadError: It cannot be served.
    """
    fields = dict(env_args)
    select = fields.pop(SELECT, None) or {}
    fields["taskset"] = _taskset_fields(env_id, fields.get("taskset"))
    try:
        config = resolve_env_config(fields)
        selected = SelectConfig.model_validate(select)
    except (ValidationError, TypeError) as error:
        raise EnvArgsError(f"environment {env_id!r}: {error}") from error
    use_our_transport(uses_proxies=model_proxy)
    env = load_environment(config)
    _check_data_class(env)
    return TasksetHost(env, selected)


def _taskset_fields(env_id: str, given: Any) -> dict[str, Any]:
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise EnvArgsError(f"environment {env_id!r}: 'taskset' must be a map, not a {type(given).__name__}")
    if given.get("id", env_id) != env_id:
        raise EnvArgsError(f"environment {env_id!r}: its arguments are those of another taskset, {given['id']!r}")
    return {**given, "id": env_id}


def _check_data_class(env: Any) -> None:
    """A field that is left out when a task's data is written would be its default in the rebuilt task."""
    data_class = type(env.taskset).task_type().data_type()
    left_out = [name for name, field in data_class.model_fields.items() if field.exclude]
    if left_out:
        raise EnvironmentLoadError(
            f"{data_class.__name__} excludes {', '.join(left_out)} when it is written: a served task would lose that"
        )
