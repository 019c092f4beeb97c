"""Asks servers how a client's jobs are: each of them once a second, and at once one that may be gone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from envbus.bus.connection import Connection, Subscription
from envbus.bus.messages import Check, Gone, Status, pack, parse_as
from envbus.bus.subjects import Subjects
from envbus.bus.tasks import TaskSet
from envbus.client.job_lists import in_messages
from envbus.errors import BusPermissionError, EnvbusError, NoServerError
from envbus.notices import Notices
from envbus.settings import PROBE_TIMEOUT_S

log = logging.getLogger("envbus.client")

PROGRESS_BYTES = 70
"""What a job's progress takes in a check, beside its id."""


class Checks:
    """The checks of one client. On the bus loop.

    Args:
        holders: Returns the jobs that each server holds.
        suspects: Returns servers to ask again at once.
        follow: Told of a server and the jobs there before these are checked.
        progress: Returns how much of a job's progress is here from a server; None: it has none.
        on_status: Gets ``(server, status)`` of an answer.
        on_nobody: Gets a server that NATS does not know (503).
        on_ended: Gets a server that a controller saw end.
    """

    def __init__(
        self,
        connection: Connection,
        subjects: Subjects,
        *,
        client_id: str,
        interval_s: float,
        holders: Callable[[], Mapping[str, Sequence[str]]],
        suspects: Callable[[], Collection[str]],
        follow: Callable[[str, Sequence[str]], None],
        progress: Callable[[str, str], tuple[int, int, int] | None],
        on_status: Callable[[str, Status], None],
        on_nobody: Callable[[str], None],
        on_ended: Callable[[str], None],
        tasks: TaskSet,
        notices: Notices,
    ) -> None:
        self._connection = connection
        self._subjects = subjects
        self._client_id = client_id
        self._interval_s = interval_s
        self._holders = holders
        self._suspects = suspects
        self._follow = follow
        self._progress = progress
        self._on_status = on_status
        self._on_nobody = on_nobody
        self._on_ended = on_ended
        self._tasks = tasks
        self._notices = notices
        self._under_way: set[str] = set()
        self._doubted: set[str] = set()
        """Servers that are being asked since news of their end came."""
        self._urgent: set[str] = set()
        self._last_at = 0.0
        self._news: Subscription | None = None

    async def open(self) -> None:
        """Listen for controllers that saw a server end."""
        self._news = await self._connection.subscribe(
            self._subjects.gone, self._on_news, optional="the end of a server is noticed a little later"
        )

    async def close(self) -> None:
        """Listen no more."""
        if self._news is not None:
            await self._connection.leave(self._news)

    def hurry(self) -> None:
        """Check with the next tick, as after an outage."""
        self._last_at = 0.0

    def hurry_with(self, server: str) -> None:
        """Check this server with the next tick: it has something that is missing here."""
        self._urgent.add(server)

    def tick(self, now: float) -> None:
        """Check every server whose turn it is, and the suspects always, unless the last check is still unanswered."""
        if is_round := now - self._last_at >= self._interval_s:
            self._last_at = now
        suspects = {*self._suspects(), *self._urgent}
        if not is_round and not suspects:
            return
        self._urgent &= self._under_way
        for server, jobs in self._holders().items():
            if (is_round or server in suspects) and server not in self._under_way:
                self._under_way.add(server)
                self._tasks.spawn(self._check_all(server, jobs))

    async def _check_all(self, server: str, jobs: Sequence[str]) -> None:
        try:
            self._follow(server, jobs)
            for some in in_messages(jobs, self._connection.max_payload, extra_bytes=self._extra_bytes(server, jobs)):
                await self._check(server, some)
        finally:
            self._under_way.discard(server)

    def _extra_bytes(self, server: str, jobs: Sequence[str]) -> int:
        return PROGRESS_BYTES if any(self._progress(job_id, server) is not None for job_id in jobs) else 0

    async def _check(self, server: str, jobs: Sequence[str]) -> None:
        here = [(job_id, *known) for job_id in jobs if (known := self._progress(job_id, server)) is not None]
        message = pack(Check(client=self._client_id, jobs=list(jobs), progress=here or None))
        try:
            data = await self._connection.request(self._subjects.server(server), message, timeout_s=PROBE_TIMEOUT_S)
            status = parse_as(data, Status)
        except NoServerError:
            self._on_nobody(server)
        except BusPermissionError as error:
            log.debug("a check was denied: %s", error)  # the session ends the jobs
        except TimeoutError:
            log.debug("a check was not answered in %g s", PROBE_TIMEOUT_S, extra={"server": server, "jobs": len(jobs)})
        except EnvbusError as error:
            self._note("bad answer", f"server {server[:8]} answered a check with: {error}", server=server)
        else:
            self._on_status(server, status)

    def _on_news(self, message: Any) -> None:
        """Believed no further than to check: anybody may say that a server is gone."""
        try:
            news = parse_as(message.data, Gone)
        except EnvbusError as error:
            self._note("bad news", f"the news of a server's end was dropped: {error}")
            return
        jobs = self._holders().get(news.server)
        if jobs:
            text = f"server {news.server[:8]} has ended, with {len(jobs)} jobs of this client: {news.reason}"
            self._note("server ended", text, server=news.server, jobs=len(jobs))
            self._on_ended(news.server)
            if news.server not in self._doubted:  # the news may be a flood
                self._doubted.add(news.server)
                self._tasks.spawn(self._check_ended(news.server, jobs[0]))

    async def _check_ended(self, server: str, job: str) -> None:
        try:
            await self._check(server, [job])
        finally:
            self._doubted.discard(server)

    def _note(self, kind: str, text: str, **fields: Any) -> None:
        self._notices.note(kind, text, time.monotonic(), fields=fields)
