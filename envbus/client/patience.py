"""Ends the jobs of a client that wait for a server, once none can be expected to take them; running ones go on.

That is so when nobody has been there for too long, or at once when it is certain that
the env cannot be loaded. On the bus loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from envbus.bus.connection import Connection
from envbus.bus.subjects import Subjects
from envbus.bus.tasks import TaskSet
from envbus.client.absence import Absence
from envbus.client.crashes import Crashes
from envbus.client.dispatch import Dispatch
from envbus.errors import EnvbusError

LOOK_S = 0.1


class Patience:
    """Looks after the waiting jobs of one client.

    Args:
        dispatch: Knows which jobs wait.
        absence: Knows what servers answered to them.
        tasks: Owner of what goes on here.
        end: Ends one waiting job.
    """

    def __init__(
        self,
        connection: Connection,
        subjects: Subjects,
        *,
        dispatch: Dispatch,
        absence: Absence,
        tasks: TaskSet,
        end: Callable[[str, EnvbusError], None],
    ) -> None:
        self._connection = connection
        self._subjects = subjects
        self._dispatch = dispatch
        self._absence = absence
        self._tasks = tasks
        self._end = end
        self._giving_up = False
        self._watching = False

    def tick(self, now: float) -> None:
        """Time has passed, and the connection is up."""
        if self._dispatch.waiting_in_line and not self._giving_up and (verdict := self._absence.verdict(now)):
            self._giving_up = True
            self._tasks.spawn(self._give_up(verdict))
        if self._nobody_takes_jobs and not self._watching:
            self._watching = True
            self._tasks.spawn(self._watch_for_crashes())

    @property
    def _nobody_takes_jobs(self) -> bool:
        return self._dispatch.waiting_in_line and self._absence.nobody_is_ready

    async def _give_up(self, verdict: str) -> None:
        """It has lasted too long."""
        waiting = self._dispatch.pending()
        try:
            error = await self._absence.explain(verdict)
        finally:
            self._giving_up = False
        if error is not None:
            self._end_all(waiting, error)

    async def _watch_for_crashes(self) -> None:
        try:
            async with Crashes(self._connection, self._subjects) as crashes:
                while self._nobody_takes_jobs:
                    if (error := await crashes.certain()) is not None:
                        self._end_all(self._dispatch.pending(), error)
                    await asyncio.sleep(LOOK_S)
        finally:
            self._watching = False

    def _end_all(self, jobs: Iterable[str], error: EnvbusError) -> None:
        for job_id in set(jobs).intersection(self._dispatch.pending()):
            self._end(job_id, error)
