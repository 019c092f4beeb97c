"""Tasks that have an owner: none is lost, and one that fails is heard of."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger("envbus.bus")


class TaskSet:
    """The tasks of one owner, on one loop.

    Args:
        owner: Named in the log when a task fails.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine as a task of this owner."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def repeat(self, function: Callable[[], None], *, every_s: float) -> None:
        """Call a function again and again; one call that fails is logged and does not end the others."""
        self.spawn(self._repeat(function, every_s))

    async def _repeat(self, function: Callable[[], None], every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                function()
            except Exception:
                log.exception("%s: a periodic step failed", self._owner)

    async def close(self) -> None:
        """Cancel all tasks, save the one that calls this, and wait for their ends."""
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of %s failed", self._owner, exc_info=task.exception())
