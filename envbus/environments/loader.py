"""load_environment: from an env_id to an environment, with an error of its own for each way that can fail."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from envbus.error_chain import ErrorChain
from envbus.errors import (
    EnvArgsError,
    EnvironmentCrashedError,
    EnvironmentNotFoundError,
    LoaderMissingError,
    UsageError,
)

BUNDLED_PACKAGE = "envbus.environments.bundled"
TypedArguments = Callable[[Callable[..., Any], dict[str, Any]], dict[str, Any]]
OtherLoader = Callable[[ModuleType], Callable[..., Any] | None]
HOSTABLE_METHODS = ("run_rollout", "run_group", "requires_group_rollouts", "eval_examples", "close")


def load_environment(env_id: str, /, **env_args: Any) -> Any:
    """Import the module that ``env_id`` names and call its ``load_environment``.

    An owner prefix (``owner/``) and a version suffix (``@1.2.0``) are ignored; hyphens become underscores. An installed
    module wins over a bundled environment of the same name, if it has a ``load_environment``.

    Args:
        env_id: Name of the environment, e.g. ``"reverse-text"``.
        **env_args: Arguments of its ``load_environment``.

    Returns:
        What that function returns, with ``env_id`` and ``env_args`` set if they were empty.

    Raises:
        EnvironmentNotFoundError: No such module.
        LoaderMissingError: The module has no ``load_environment``.
        EnvArgsError: It does not take these arguments.
        EnvironmentCrashedError: The environment's own code raised or exited.
    """
    return load_with(env_id, env_args)


def load_with(
    env_id: str,
    env_args: Mapping[str, Any],
    *,
    typed: TypedArguments | None = None,
    otherwise: OtherLoader | None = None,
    namespaces: Sequence[str] = (),
) -> Any:
    """Do what load_environment does, with a say in what the environment's function gets.

    Args:
        env_id: Name of the environment.
        env_args: Arguments of its function.
        typed: Gets that function and the arguments; returns those that it is called with.
        otherwise: Gets a module that has no ``load_environment``; returns a function to use instead, if it has one.
        namespaces: Further packages to look for the module in, if it is nowhere else.

    Returns:
        As load_environment.

    Raises:
        EnvironmentLoadError: As load_environment.
    """
    load = _load_function(env_id, otherwise, namespaces)
    given = dict(env_args)
    _check_arguments(env_id, load, given)
    env = _call_foreign(env_id, "load_environment", lambda: load(**(typed(load, given) if typed else given)))
    if env is None:
        raise EnvironmentCrashedError(f"load_environment of {env_id!r} returned None instead of an environment")
    for name, value in (("env_id", env_id), ("env_args", given)):
        if not getattr(env, name, None):
            with suppress(AttributeError, TypeError):
                setattr(env, name, value)
    return env


def add_env_dir(env_dir: str | Path, env_id: str) -> None:
    """Make an environment below ``env_dir`` importable: ``<dir>/<name>.py``, or that in a folder of its own."""
    root = Path(env_dir).resolve()
    for folder in (root, root / _module_name(env_id)):
        if folder.is_dir() and str(folder) not in sys.path:
            sys.path.append(str(folder))
    importlib.invalidate_caches()


def check_hostable(env: object) -> list[str]:
    """The parts of the hosting protocol that ``env`` lacks; empty if a server can host it."""
    return [name for name in HOSTABLE_METHODS if not _has(env, name)]


def apply_settings(env: Any, settings: Mapping[str, Any]) -> None:
    """Set attributes of a loaded environment, see Environment.set_kwargs.

    Raises:
        UsageError: It has no such settings.
    """
    if not settings:
        return
    if not callable(getattr(env, "set_kwargs", None)):
        raise UsageError(f"{type(env).__name__} takes no extra settings: it has no method set_kwargs")
    env.set_kwargs(**settings)


def _has(env: object, name: str) -> bool:
    return hasattr(env, name) if name == "requires_group_rollouts" else callable(getattr(env, name, None))


def _module_name(env_id: str) -> str:
    name = env_id.rpartition("/")[2].partition("@")[0].replace("-", "_")
    if not all(part.isidentifier() for part in name.split(".")):
        raise EnvironmentNotFoundError(f"{env_id!r} is not the name of an environment; one looks like owner/my-env")
    return name


def _load_function(env_id: str, otherwise: OtherLoader | None, namespaces: Sequence[str]) -> Callable[..., Any]:
    name = _module_name(env_id)
    candidates = _existing(env_id, [name, f"{BUNDLED_PACKAGE}.{name}"])
    candidates = candidates or _existing(env_id, [f"{each}.{name}" for each in namespaces])
    if not candidates:
        raise EnvironmentNotFoundError(
            f"no environment {env_id!r}: there is no module {name!r} here; install its package, or check the name"
        )
    for candidate in candidates:
        module = _call_foreign(env_id, "import", partial(importlib.import_module, candidate))
        load = getattr(module, "load_environment", None)
        if callable(load):
            return load  # type: ignore[no-any-return]
        if otherwise is not None and (instead := otherwise(module)) is not None:
            return instead
    raise LoaderMissingError(
        f"module {name!r} ({_place(module)}) has no function load_environment and exports no taskset, so it is not "
        f"environment {env_id!r}; another package or file of that name may be in the way"
    )


def _existing(env_id: str, modules: Iterable[str]) -> list[str]:
    return [each for each in modules if _call_foreign(env_id, "import", partial(_exists, each))]


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _check_arguments(env_id: str, load: Callable[..., Any], env_args: dict[str, Any]) -> None:
    signature = inspect.signature(load)
    try:
        signature.bind(**env_args)
    except TypeError as error:
        accepted = ", ".join(signature.parameters) or "no arguments"
        raise EnvArgsError(f"environment {env_id!r}: {error}; it takes: {accepted}") from error


def _call_foreign(env_id: str, step: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except EnvArgsError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentCrashedError(f"environment {env_id!r}: {step} raised {_short(error)}") from error


def _short(error: BaseException) -> str:
    text = repr(ErrorChain(error))
    return text if len(text) <= 500 else text[:499] + "…"


def _place(module: ModuleType) -> str:
    return str(getattr(module, "__file__", None) or "a namespace package")
