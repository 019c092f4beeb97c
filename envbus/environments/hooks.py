"""Decorators that mark methods as stop conditions, cleanup or teardown hooks, and how hooks are found and called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])
HookKind = Literal["stop", "cleanup", "teardown"]


@overload
def stop(func: F, /) -> F: ...
@overload
def stop(*, priority: int = 0) -> Callable[[F], F]: ...
def stop(func: F | None = None, /, *, priority: int = 0) -> F | Callable[[F], F]:
    """Mark a method ``(state) -> bool`` as a condition that ends the rollout.

    Args:
        func: The method, when used without parentheses.
        priority: Higher ones are asked first; ties go by name.
    """
    return _marked(func, "stop", priority)


@overload
def cleanup(func: F, /) -> F: ...
@overload
def cleanup(*, priority: int = 0) -> Callable[[F], F]: ...
def cleanup(func: F | None = None, /, *, priority: int = 0) -> F | Callable[[F], F]:
    """Mark a method ``(state)`` to run once when a rollout ends, however it ends.

    Args:
        func: The method, when used without parentheses.
        priority: Higher ones run first; ties go by name.
    """
    return _marked(func, "cleanup", priority)


@overload
def teardown(func: F, /) -> F: ...
@overload
def teardown(*, priority: int = 0) -> Callable[[F], F]: ...
def teardown(func: F | None = None, /, *, priority: int = 0) -> F | Callable[[F], F]:
    """Mark a method ``()`` to run once when the environment or rubric is closed.

    Args:
        func: The method, when used without parentheses.
        priority: Higher ones run first; ties go by name.
    """
    return _marked(func, "teardown", priority)


def find_hooks(owner: Any, kind: HookKind) -> list[Callable[..., Any]]:
    """The bound methods of ``owner`` that carry the mark, in the order in which they run."""
    owner_class: Any = type(owner)
    return [getattr(owner, name) for name in _hook_names(owner_class, kind)]


@lru_cache(maxsize=1_024)
def _hook_names(owner: type, kind: HookKind) -> tuple[str, ...]:
    priorities: dict[str, int] = {}
    for name in dir(owner):
        priority = getattr(getattr(owner, name, None), f"_envbus_{kind}", None)
        if isinstance(priority, int):
            priorities[name] = priority
    return tuple(sorted(priorities, key=lambda name: (-priorities[name], name)))


async def call_named(func: Callable[..., Any], objects: dict[str, Any]) -> Any:
    """Call ``func``, sync or async, with those of ``objects`` that its parameters name (all, if it takes ``**kwargs``).

    Plain functions run on the event loop: code of environments is rarely thread-safe. Make a slow one async.
    """
    parameters = signature_of(func).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        objects = {p.name: objects[p.name] for p in parameters if p.name in objects}
    return await settled(func(**objects))


def signature_of(func: Callable[..., Any]) -> inspect.Signature:
    """The signature of ``func``; reading one takes longer than most reward functions, so it is kept."""
    try:
        return _kept_signature(func)
    except TypeError:  # a callable object that cannot be hashed
        return inspect.signature(func)


_kept_signature = lru_cache(maxsize=1_024)(inspect.signature)


async def settled(value: Any) -> Any:
    """The value, awaited if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


def _marked(func: F | None, kind: HookKind, priority: int) -> F | Callable[[F], F]:
    def mark(method: F) -> F:
        setattr(method, f"_envbus_{kind}", priority)
        return method

    return mark if func is None else mark(func)
