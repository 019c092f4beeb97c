"""The rollouts of a group end with the call that started them.

The library gathers them, so when one raises, the call ends and the others go on, calling the model for nobody.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

log = logging.getLogger("envbus.server")

END_TIMEOUT_S = 60.0
"""What cancelled members get for their cleanup."""

_members: ContextVar[set[asyncio.Task[Any]] | None] = ContextVar("envbus_classic_members", default=None)


def watch_members(environment: Any) -> None:
    """Note the tasks that run this environment's rollouts, in a call that wants to know them."""
    rollout = environment.rollout

    @functools.wraps(rollout)
    async def watched(*arguments: Any, **settings: Any) -> Any:
        members, task = _members.get(), asyncio.current_task()
        if members is not None and task is not None:
            members.add(task)
        return await rollout(*arguments, **settings)

    environment.rollout = watched


@asynccontextmanager
async def members_end_with_call() -> AsyncIterator[None]:
    """Cancel and await, at the end, the rollouts that were started in here and still run."""
    members: set[asyncio.Task[Any]] = set()
    token = _members.set(members)
    try:
        yield
    finally:
        _members.reset(token)
        await _end({task for task in members if not task.done() and task is not asyncio.current_task()})


async def _end(tasks: set[asyncio.Task[Any]]) -> None:
    if not tasks:
        return
    for task in tasks:
        task.cancel()
    _, left = await asyncio.wait(tasks, timeout=END_TIMEOUT_S)
    if left:
        log.error("%d rollouts of a failed group did not end within %g s; they are left", len(left), END_TIMEOUT_S)
