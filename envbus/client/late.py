"""Sends of jobs that are over: a server that takes one up late is told to stop.

A job may end (cancelled, or served elsewhere) while a send of it is still under
way. Its replies are awaited here until each send was answered or can no longer start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from envbus.bus.connection import Connection
from envbus.bus.inbox import is_closed_notice, is_no_responders
from envbus.bus.messages import Accepted, Announce, Progress, Result, parse
from envbus.errors import EnvbusError

log = logging.getLogger("envbus.client")


class LateReplies:
    """The unanswered sends of one client's finished jobs. On the bus loop.

    Args:
        stop: Called with ``(server, job id)`` when a server took a job up.
        keep_s: How long after a job's end a send of it may still start.
    """

    def __init__(self, connection: Connection, stop: Callable[[str, str], None], *, keep_s: float) -> None:
        self._connection = connection
        self._stop = stop
        self._keep_s = keep_s
        self._sends: dict[str, int] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._answered = asyncio.Event()

    def __len__(self) -> int:
        return len(self._sends)

    def expect(self, job_id: str, sends: int) -> None:
        """Await so many answers to a job that has ended."""
        self._sends[job_id] = sends
        self._connection.inbox.route(lambda message: self._on_answer(job_id, message), token=job_id)
        self._timers[job_id] = asyncio.get_running_loop().call_later(self._keep_s, self._drop, job_id)

    async def answered(self) -> None:
        """Wait until every send was answered."""
        while self._sends:
            self._answered.clear()
            await self._answered.wait()

    def clear(self) -> None:
        """Await nothing more."""
        for job_id in list(self._sends):
            self._drop(job_id)

    def _on_answer(self, job_id: str, message: Any) -> None:
        if is_closed_notice(message):
            self._drop(job_id)
            return
        if not is_no_responders(message):
            try:
                answer = parse(message.data)
            except EnvbusError as error:
                log.warning("a late reply for job %s was dropped: %s", job_id, error)
                return
            if isinstance(answer, Accepted | Announce | Progress | Result):
                self._stop(answer.server, job_id)
            if isinstance(answer, Announce | Progress | Result):
                return  # not the answer to a send, which is still to come
        self._sends[job_id] -= 1
        if self._sends[job_id] <= 0:
            self._drop(job_id)

    def _drop(self, job_id: str) -> None:
        if self._sends.pop(job_id, None) is not None:
            self._timers.pop(job_id).cancel()
            self._connection.inbox.unroute(job_id)
            self._answered.set()
