"""When large results are fetched and large inputs sent, and what it means when that fails. On the bus loop."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from envbus.bus.connection import Connection
from envbus.bus.messages import Parts
from envbus.bus.tasks import TaskSet
from envbus.bus.transfer import Packed, cut
from envbus.client.client_job import ClientJob
from envbus.client.transfers import Transfers
from envbus.errors import EnvbusError, NoServerError, RemoteError, ResultLostError
from envbus.job_log import JobLog
from envbus.settings import INLINE_BYTES, PART_BYTES

log = logging.getLogger("envbus.client")

ENVELOPE_BYTES = 1024
"""More than any envelope around a body takes."""
MAX_COLLECTIONS = 3
"""Tries to collect one result before its job is sent again."""


class JobOwner(Protocol):
    """Who follows the jobs."""

    def end(self, job_id: str, outcome: Packed | EnvbusError, served_by: str | None) -> None:
        """The job is over."""

    def nobody_answers(self, server: str) -> None:
        """NATS does not know this server (503)."""

    def attempt_failed(self, job_id: str, server: str, reason: str) -> None:
        """The server cannot finish the job."""

    def is_awaited_from(self, job_id: str, server: str) -> bool:
        """Whether this server's word on the job still counts."""


class LargeBodies:
    """Bodies of one client's jobs that do not fit on a message."""

    def __init__(
        self, connection: Connection, transfers: Transfers, owner: JobOwner, tasks: TaskSet, *, log: JobLog
    ) -> None:
        self._connection = connection
        self._transfers = transfers
        self._owner = owner
        self._tasks = tasks
        self._log = log
        self._collectors: dict[str, set[asyncio.Task[Any]]] = {}

    def upload_parts(self, job: ClientJob) -> Parts | None:
        """Return how the job's input travels in parts; None: it rides on its message."""
        room = self._connection.max_payload - ENVELOPE_BYTES
        if len(job.body.data) <= min(INLINE_BYTES, room):
            return None
        return cut(job.body, max(1, min(PART_BYTES, room)))

    def upload(self, job: ClientJob, server: str) -> None:
        """Send the job's input, if it is large, to the server that accepted it."""
        parts = self.upload_parts(job)
        if parts is not None and job.uploading_to != server:
            job.uploading_to = server
            self._log.step("input goes in parts", job.job, server=server, bytes=parts.size, parts=parts.parts)
            self._tasks.spawn(self._upload(job, server, parts))

    def collect(self, job: ClientJob, server: str, parts: Parts | None) -> None:
        """Fetch the job's result, unless that is under way."""
        if job.collecting_from is None:
            job.collecting_from = server
            size_bytes = parts.size if parts is not None else None
            self._log.step("result is collected", job.job, server=server, bytes=size_bytes)
            task = self._tasks.spawn(self._collect(job, server, parts))
            self._collectors.setdefault(job.job, set()).add(task)

    async def _collect(self, job: ClientJob, server: str, parts: Parts | None) -> None:
        try:
            body = await self._transfers.pull(job.job, server, parts)
        except* (NoServerError, TimeoutError, ResultLostError) as errors:
            self._not_collected(job, server, _first(errors))
        except* EnvbusError as errors:
            self._collection_failed(job, server, _first(errors))
        except* Exception as errors:
            log.exception("a result could not be collected", extra={"job": job.job, "server": server})
            self._collection_failed(job, server, _first(errors))
        else:
            job.pulled = True
            self._owner.end(job.job, body, server)

    def over(self, job_id: str) -> None:
        """The job has ended: nobody collects its result any more, nor waits for room for it."""
        for task in self._collectors.pop(job_id, ()):
            if task is not asyncio.current_task():  # the one that has just brought the result ends by itself
                task.cancel()

    def taken(self, job_id: str) -> None:
        """The caller has the job's result, or nobody wants it: there is room for others."""
        self._transfers.undelivered.release(job_id)

    def _collection_failed(self, job: ClientJob, server: str, error: BaseException) -> None:
        """The result is there and of no use: that ends the job."""
        self._collects_no_more(job, server)
        if self._owner.is_awaited_from(job.job, server):
            text = f"the result could not be put together: {type(error).__name__}: {error}"
            self._owner.end(job.job, error if isinstance(error, EnvbusError) else RemoteError(text), server)

    def _not_collected(self, job: ClientJob, server: str, error: BaseException) -> None:
        """The result may be there, lost, or run elsewhere: the next check tells, a few times."""
        self._collects_no_more(job, server)
        if not self._owner.is_awaited_from(job.job, server):
            return  # the job is over, or is run elsewhere
        job.failed_collections += 1
        why = f"from server {server[:8]}, try {job.failed_collections}: {str(error) or type(error).__name__}"
        self._log.trouble("a result could not be collected", job.job, why, server=server)
        if isinstance(error, NoServerError):
            self._owner.nobody_answers(server)
        elif job.failed_collections >= MAX_COLLECTIONS:
            self._owner.attempt_failed(job.job, server, f"its result could not be collected from {server[:8]}")

    def _collects_no_more(self, job: ClientJob, server: str) -> None:
        if job.collecting_from == server:  # not another one by now, as the job was sent again
            job.collecting_from = None

    async def _upload(self, job: ClientJob, server: str, parts: Parts) -> None:
        try:
            await self._transfers.push(job.job, server, job.body, parts)
        except* (TimeoutError, EnvbusError) as errors:
            self._upload_failed(job.job, server, _first(errors))
        except* Exception as errors:
            log.exception("an input could not be sent", extra={"job": job.job, "server": server})
            self._upload_failed(job.job, server, _first(errors))

    def _upload_failed(self, job_id: str, server: str, error: BaseException) -> None:
        if not self._owner.is_awaited_from(job_id, server):
            return
        if isinstance(error, EnvbusError) and not error.retryable:
            self._owner.end(job_id, error, server)
            return
        text = str(error) or type(error).__name__
        self._owner.attempt_failed(job_id, server, f"its input could not be sent to server {server[:8]}: {text}")


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
