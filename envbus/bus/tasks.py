"""Tasks that have an owner: none is lost, and one that fails is heard of."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from envbus.notices import Notices

log = logging.getLogger("envbus.bus")


class TaskSet:
    """The tasks of one owner, on one loop.

    Args:
        owner: Named in the log when a task fails.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[Any]] = set()
        self._notices = Notices(log)

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine as a task of this owner."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def repeat(self, function: Callable[[], None], *, every_s: float) -> None:
        """Call a function again and again; one call that fails is logged and does not end the others."""
        self.spawn(self._repeat(function, every_s))

    async def _repeat(self, function: Callable[[], None], every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                function()
            except Exception as error:  # noqa: BLE001 - logged, and the step is done again
                self._notices.note("step", f"{self._owner}: a periodic step failed", time.monotonic(), error=error)

    async def close(self) -> None:
        """Cancel all tasks, save the one that calls this, and wait for their ends."""
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._notices.close(time.monotonic())

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            text = f"a task of {self._owner} failed"
            self._notices.note("task", text, time.monotonic(), error=task.exception())
