"""What comes for jobs that are over: a server that takes one up late is told to stop, a late result is dropped.

A job may end (cancelled, or served elsewhere) while a send of it is still under
way. Its replies are awaited here until each send was answered or can no longer start.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from envbus.bus.connection import Connection
from envbus.bus.inbox import is_closed_notice, is_no_responders
from envbus.bus.messages import Accepted, Announce, Progress, Result, WireMessage, parse
from envbus.errors import EnvbusError
from envbus.job_log import JobLog

MAX_FORMER = 10_000
"""Delivered jobs remembered that more than one server was sent."""
_MAX_TEXT = 200


class LateReplies:
    """The unanswered sends of one client's finished jobs, and what else comes for these. On the bus loop.

    Args:
        stop: Called with ``(server, job id)`` when a server took a job up.
        keep_s: How long after a job's end a send of it may still start.
        counts: ``late_accepts``, ``late_results`` and ``bad_messages`` are counted here.
    """

    def __init__(
        self,
        connection: Connection,
        stop: Callable[[str, str], None],
        *,
        keep_s: float,
        counts: Counter[str],
        log: JobLog,
    ) -> None:
        self._connection = connection
        self._stop = stop
        self._keep_s = keep_s
        self._counts = counts
        self._log = log
        self._sends: dict[str, int] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._answered = asyncio.Event()
        self._former: OrderedDict[str, None] = OrderedDict()
        connection.inbox.strays.add(self._on_stray)

    def __len__(self) -> int:
        return len(self._sends)

    def expect(self, job_id: str, sends: int) -> None:
        """Await so many answers to a job that has ended."""
        self._sends[job_id] = sends
        self._connection.inbox.route(lambda message: self._on_answer(job_id, message), token=job_id)
        self._timers[job_id] = asyncio.get_running_loop().call_later(self._keep_s, self._drop, job_id)

    def remember(self, job_id: str) -> None:
        """A job was delivered that more servers than one were sent: what the others still say is logged."""
        self._former[job_id] = None
        if len(self._former) > MAX_FORMER:
            self._former.popitem(last=False)

    async def answered(self) -> None:
        """Wait until every send was answered."""
        while self._sends:
            self._answered.clear()
            await self._answered.wait()

    def clear(self) -> None:
        """Await nothing more."""
        self._connection.inbox.strays.discard(self._on_stray)
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
                self._counts["bad_messages"] += 1
                self._log.trouble("a late reply was dropped", job_id, str(error)[:_MAX_TEXT])
                return
            self._note(job_id, answer)
            if isinstance(answer, Accepted | Announce | Progress | Result):
                self._stop(answer.server, job_id)
            if isinstance(answer, Announce | Progress | Result):
                return  # not the answer to a send, which is still to come
        self._sends[job_id] -= 1
        if self._sends[job_id] <= 0:
            self._drop(job_id)

    def _on_stray(self, token: str, message: Any) -> None:
        if token not in self._former or is_no_responders(message):
            return
        with contextlib.suppress(EnvbusError):
            self._note(token, parse(message.data))

    def _note(self, job_id: str, answer: WireMessage) -> None:
        match answer:
            case Accepted(server=server, attempt=attempt):
                self._counts["late_accepts"] += 1
                what = "a late acceptance was stopped"
            case Announce(server=server, attempt=attempt) | Result(server=server, attempt=attempt):
                self._counts["late_results"] += 1
                what = "a late result was dropped"
            case _:
                return
        if job_id in self._former:
            why = f"server {server[:8]} sent it when another had delivered"
            self._log.trouble(what, job_id, why, server=server, attempt=attempt)
        else:  # its caller gave it up while it was under way
            self._log.step(what, job_id, server=server, attempt=attempt)

    def _drop(self, job_id: str) -> None:
        if self._sends.pop(job_id, None) is not None:
            self._timers.pop(job_id).cancel()
            self._connection.inbox.unroute(job_id)
            self._answered.set()
